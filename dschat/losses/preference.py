"""Preference optimisation without a reward model: plain functions of sequence log-probs, each → (loss, metrics).

`chosen` and `rejected` are log-probs of whole responses given their prompt, in nats, under the model being trained:
sums over response tokens (see sequence_logprobs), or means per token where documented; `ref_chosen` and
`ref_rejected` are the same under the frozen reference. They are [B] float, and only the first two receive a gradient.

Normaliser, metrics and precision follow dschat.losses.normalizer; the normaliser counts pairs. Every loss has the
metrics, named as in TRL: rewards/chosen, rewards/rejected (the implicit rewards, for most β·(logprob − ref_logprob)),
rewards/margins (mean of their difference), rewards/accuracies (share of pairs whose chosen reward is higher; a tie, as
is every pair before the first update, counts half), logps/chosen and logps/rejected.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat.losses.normalizer import Metrics, Normalizer, divisor
from dschat.tensors import at_least_float32, require_mask


def sequence_logprobs(logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Log-prob of each response: the sum over its tokens.

    Args:
        logprobs: [B, S] float, nats per token.
        response_mask: [B, S] bool, True on response tokens; values at False positions are ignored.

    Returns: [B] float32 (float64 for float64), 0 for a response without tokens.
    """
    require_mask(response_mask, logprobs=logprobs)
    return torch.where(response_mask, at_least_float32(logprobs), 0.0).sum(dim=1)


def dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float,
    label_smoothing: float = 0.0, normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """−(1 − ε)·log σ(z) − ε·log σ(−z), with z = β·((chosen − ref_chosen) − (rejected − ref_rejected)).

    With mean instead of summed log-probs it is the length-normalised DPO of Tülu 3.

    Args:
        beta: strength of the regularisation towards the reference, > 0.
        label_smoothing: ε in [0, 0.5), the assumed share of flipped labels; above 0 it is "conservative DPO".

    Raises:
        ValueError: shapes that differ, beta or label_smoothing out of range.

    Source: Rafailov et al. 2023, eq. 7 (arXiv:2305.18290); smoothing: Mitchell 2023, "A note on DPO with noisy
        preferences"; length: Lambert et al. 2024, section 5.1 (arXiv:2411.15124).
    """
    _check_smoothing(label_smoothing)
    rewards = _implicit_rewards(chosen, rejected, ref_chosen, ref_rejected, beta)
    z = rewards[0] - rewards[1]
    losses = -(1 - label_smoothing) * F.logsigmoid(z)
    if label_smoothing:
        losses = losses - label_smoothing * F.logsigmoid(-z)
    return _loss_and_metrics(losses, rewards, (chosen, rejected), normalizer)


def robust_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float,
    label_smoothing: float = 0.0, normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """(−(1 − ε)·log σ(z) + ε·log σ(−z)) / (1 − 2ε): its mean over labels flipped with probability ε is the DPO loss.

    The divisor, omitted by some systems, makes the loss unbiased.

    Args:
        label_smoothing: ε in [0, 0.5), the share of flipped labels.

    Source: Chowdhury et al. 2024, section 3 (arXiv:2403.00409); z as in dpo_loss.
    """
    _check_smoothing(label_smoothing)
    rewards = _implicit_rewards(chosen, rejected, ref_chosen, ref_rejected, beta)
    z = rewards[0] - rewards[1]
    losses = (-(1 - label_smoothing) * F.logsigmoid(z) + label_smoothing * F.logsigmoid(-z)) / (1 - 2 * label_smoothing)
    return _loss_and_metrics(losses, rewards, (chosen, rejected), normalizer)


def ipo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float,
    normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """(h − 1/(2β))², with h = (chosen − ref_chosen) − (rejected − ref_rejected): regresses the margin to a target.

    Args:
        chosen, rejected, ref_chosen, ref_rejected: mean log-probs per token, as step 2 passes them and as in TRL, which
            confirmed it with the paper's authors: the target 1/(2β) then does not depend on response length. Sums
            (--length_normalized False) give the equation as printed.
        beta: τ of the paper, > 0.

    Source: Azar et al. 2023, eq. 17 (arXiv:2310.12036).
    """
    rewards = _implicit_rewards(chosen, rejected, ref_chosen, ref_rejected, beta)
    h = (rewards[0] - rewards[1]) / beta
    return _loss_and_metrics((h - 1 / (2 * beta)).square(), rewards, (chosen, rejected), normalizer)


def hinge_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float,
    normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """max(0, 1 − z), z as in dpo_loss: SLiC's hinge on the log-ratio to the reference; no gradient beyond margin 1.

    Source: Zhao et al. 2023 (SLiC-HF, arXiv:2305.10425), against a reference as in Liu et al. 2023, "hinge-norm" (RSO,
        arXiv:2309.06657).
    """
    rewards = _implicit_rewards(chosen, rejected, ref_chosen, ref_rejected, beta)
    return _loss_and_metrics(F.relu(1 - (rewards[0] - rewards[1])), rewards, (chosen, rejected), normalizer)


def simpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float, gamma: float, normalizer: Normalizer = None
) -> tuple[Tensor, Metrics]:
    """−log σ(β·chosen − β·rejected − γ): no reference.

    Args:
        chosen, rejected: mean log-probs per token.
        beta: 2 to 10 is usual, as it multiplies means.
        gamma: γ ≥ 0, the target margin, in units of reward (the paper's code sets γ/β instead).

    Source: Meng et al. 2024, eq. 6 (arXiv:2405.14734).
    """
    check_beta(beta)
    rewards = beta * at_least_float32(chosen), beta * at_least_float32(rejected)
    return _loss_and_metrics(-F.logsigmoid(rewards[0] - rewards[1] - gamma), rewards, (chosen, rejected), normalizer)


def orpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float, normalizer: Normalizer = None
) -> tuple[Tensor, Metrics]:
    """−chosen − β·log σ(log odds(chosen) − log odds(rejected)), odds(p) = p / (1 − p): includes SFT, no reference.

    Args:
        chosen, rejected: mean log-probs per token, ≤ 0.
        beta: the paper's λ.

    Returns: loss and metrics; the rewards are β times the means.

    Source: Hong et al. 2024, eq. 6 and 7 (arXiv:2403.07691).
    """
    check_beta(beta)
    rewards = beta * at_least_float32(chosen), beta * at_least_float32(rejected)
    odds_ratio_loss = -F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return _loss_and_metrics(beta * odds_ratio_loss - at_least_float32(chosen), rewards, (chosen, rejected), normalizer)


def chosen_nll(chosen: Tensor, *, normalizer: Normalizer = None) -> Tensor:
    """−Σ chosen / normalizer: an SFT term that keeps the probability of the chosen response from falling.

    Args:
        chosen: mean log-probs per token, so that long and short responses have equal weight.

    Source: Pang et al. 2024, eq. 1 (arXiv:2404.19733).
    """
    return -at_least_float32(chosen).sum() / row_count(chosen, normalizer)


def _implicit_rewards(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """β·(logprob − ref_logprob) of both: r in Rafailov et al. 2023, eq. 5, up to a term that depends on the prompt."""
    check_beta(beta)
    _check_pairs(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    return tuple(
        beta * (at_least_float32(x) - at_least_float32(ref).detach())
        for x, ref in ((chosen, ref_chosen), (rejected, ref_rejected))
    )


def _log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 − p)) of p = e^logprob; p is clamped just below 1, where the odds diverge."""
    logprob = at_least_float32(logprob).clamp(max=-1e-6)
    return logprob - torch.log(-torch.expm1(logprob))


def _loss_and_metrics(
    losses: Tensor, rewards: tuple[Tensor, Tensor], logprobs: tuple[Tensor, Tensor], normalizer: Normalizer
) -> tuple[Tensor, Metrics]:
    """The loss over the pairs of the step, and the metrics common to all pair losses."""
    _check_pairs(chosen=logprobs[0], rejected=logprobs[1])
    count = row_count(losses, normalizer)
    with torch.no_grad():
        difference = rewards[0] - rewards[1]
        metrics = {
            "rewards/chosen": rewards[0].sum() / count,
            "rewards/rejected": rewards[1].sum() / count,
            "rewards/margins": difference.sum() / count,
            "rewards/accuracies": torch.heaviside(difference, difference.new_tensor(0.5)).sum() / count,
            "logps/chosen": at_least_float32(logprobs[0]).sum() / count,
            "logps/rejected": at_least_float32(logprobs[1]).sum() / count,
        }
    return losses.sum() / count, metrics


def row_count(rows: Tensor, normalizer: Normalizer) -> float | Tensor:
    """The divisor of a loss: normalizer, or the number of rows; 1 if it is 0, so 0/0 is 0."""
    return divisor(rows.numel() if normalizer is None else normalizer)


def _check_pairs(**tensors: Tensor) -> None:
    if len({x.shape for x in tensors.values()}) != 1 or next(iter(tensors.values())).dim() != 1:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"{shapes}: all must be [B], one number per response: sum over tokens first.")


def check_beta(beta: float) -> None:
    if not beta > 0:
        raise ValueError(f"beta is {beta}, but as a scale of rewards it must be > 0: 0.1 is usual (2 in SimPO).")


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing}, but it is the share of wrong labels, in [0, 0.5): with half "
            "of them wrong, labels carry no information."
        )
