"""Policy losses besides PPO's, and how the tokens of a step are weighed: plain functions of tensors.

Each takes what losses.policy_loss takes and answers alike; the rules on top of losses (normaliser, masks) hold here.
All ratios are of the policy being trained to the one that the experience was taken with, ρ = π / π_old.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.losses.normalizer import Metrics, Normalizer, count_of
from dschat.losses.policy import bounds, clipped_surrogate, policy_inputs, policy_metrics
from dschat.rlhf.advantages import kl_estimate
from dschat.tensors import at_least_float32, require_mask

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")


def aggregation_weights(
    response_mask: Tensor, aggregation: str, *, tokens: float, sequences: float, max_tokens: int
) -> Tensor:
    """What each token weighs, so that Σ w·ℓ / N is the mean that was asked for; N tokens and Q responses count.

    "token_mean": 1, all tokens alike (DAPO). "seq_mean_token_mean": N / (Q·n_i), the mean over responses of the means
    over their n_i tokens (GRPO). "seq_mean_token_sum_norm": N / (Q·L), the mean over responses of sums over a constant
    L, which no length can bend (Dr.GRPO). Every loss is divided by N of the whole step, so that nothing depends on how
    the step was cut.

    Args:
        response_mask: [B, T] bool, True on tokens that count.
        tokens, sequences: N and Q, over all ranks and micro-batches; a response counts if one of its tokens does.
        max_tokens: L, the longest response that is possible.

    Returns:
        [B, T] float32, 0 where the mask is False.

    Raises:
        ValueError: an unknown aggregation, a mask that is not bool.

    Source: Yu et al. 2025 (DAPO), eq. 12 (arXiv:2503.14476); Shao et al. 2024, eq. 3 (arXiv:2402.03300); Liu et al.
        2025 (Dr.GRPO), section 3.2 (arXiv:2503.20783).
    """
    require_mask(response_mask)
    if aggregation == "token_mean":
        per_response = torch.ones(len(response_mask), device=response_mask.device)
    elif aggregation == "seq_mean_token_mean":
        per_response = tokens / (max(sequences, 1.0) * response_mask.sum(-1).clamp(min=1))
    elif aggregation == "seq_mean_token_sum_norm":
        per_response = torch.full((len(response_mask),), tokens / (max(sequences, 1.0) * max_tokens))
    else:
        raise ValueError(f'aggregation "{aggregation}" is not known: choose one of {", ".join(AGGREGATIONS)}.')
    return torch.where(response_mask, per_response.float().to(response_mask.device).unsqueeze(-1), 0.0)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_range: float | tuple[float, float],
    weights: Tensor | None = None,
    normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:
    """PPO's surrogate with the ratio of whole responses: s_i = exp(mean over tokens of log ρ), clipped as one.

    In the form for token advantages: s_it = sg[s_i]·π_it / sg[π_it], whose value is s_i and whose gradient goes through
    token t alone. With one advantage per response and "seq_mean_token_mean" it is the sequence form, gradient included.

    Args, returns, raises: as losses.policy_loss; clip_fraction is the share of tokens in clipped responses. A
        response's ratio moves far less than a token's, so clip_range is small: 3e-4 and 4e-4 in the paper.

    Source: Zheng et al. 2025, eqs. 5, 7, 13 and 14 (arXiv:2507.18071).
    """
    low, high = bounds(clip_range)
    log_ratio, advantages, weights = policy_inputs(logprobs, old_logprobs, advantages, response_mask, weights)
    count = count_of(response_mask, normalizer)
    length = response_mask.sum(-1, keepdim=True).clamp(min=1)
    log_sequence = (log_ratio.sum(-1, keepdim=True) / length).detach()  # [B, 1]
    ratio = (log_sequence + log_ratio - log_ratio.detach()).exp()  # [B, T]
    per_token, cut = clipped_surrogate(ratio, advantages, low, high)
    loss = (weights * per_token).sum() / count
    return loss, policy_metrics(log_ratio.detach(), cut, response_mask, count)


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_range: float | tuple[float, float],
    weights: Tensor | None = None,
    normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:
    """REINFORCE with clipped importance weights: Σ −w·sg[clip(ρ, 1 − low, 1 + high)]·A·log π / normalizer.

    No token loses its gradient, only its weight is bounded. The paper bounds it from above alone: low = 1. (verl clips
    on both sides of 1, TRL takes the upper bound itself: its 5 is high = 4 here.)

    Args, returns, raises: as losses.policy_loss; clip_fraction is the share of tokens whose weight was clipped.

    Source: MiniMax 2025 (MiniMax-M1), eqs. 4 and 5 (arXiv:2506.13585).
    """
    low, high = bounds(clip_range)
    log_ratio, advantages, weights = policy_inputs(logprobs, old_logprobs, advantages, response_mask, weights)
    count = count_of(response_mask, normalizer)
    ratio = log_ratio.detach().exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    kept = torch.where(response_mask, at_least_float32(logprobs), 0.0)
    loss = (-weights * clipped * advantages * kept).sum() / count
    return loss, policy_metrics(log_ratio.detach(), response_mask & (clipped != ratio), response_mask, count)


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    positive_temperature: float,
    negative_temperature: float,
    weights: Tensor | None = None,
    normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:
    """A soft gate instead of clipping: Σ −w·A·(4/τ)·σ(τ·(ρ − 1)) / normalizer, τ by the sign of A.

    At ρ = 1 its slope is that of −A·ρ, and it falls smoothly to 0 as ρ leaves 1 on either side.

    Args, returns, raises: as losses.policy_loss; clip_fraction is the share of tokens whose slope fell below half.
        positive_temperature, negative_temperature: τ > 0 of tokens with A > 0, and of the others; a larger one
            forgets off-policy tokens sooner. 1.0 and 1.05 in the paper.

    Source: Gao et al. 2025, section 3 (arXiv:2511.20347).
    """
    if not (positive_temperature > 0 and negative_temperature > 0):
        raise ValueError(
            f"the temperatures are {positive_temperature} and {negative_temperature}, but they scale a gate, so > 0."
        )
    log_ratio, advantages, weights = policy_inputs(logprobs, old_logprobs, advantages, response_mask, weights)
    count = count_of(response_mask, normalizer)
    temperature = torch.where(advantages > 0, positive_temperature, negative_temperature)
    gate = torch.sigmoid(temperature * (log_ratio.exp() - 1))  # [B, T]
    loss = (-weights * advantages * 4 / temperature * gate).sum() / count
    slope = (4 * gate * (1 - gate)).detach()
    return loss, policy_metrics(log_ratio.detach(), response_mask & (slope < 0.5), response_mask, count)


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    estimator: str,
    clip: float | None = None,
    weights: Tensor | None = None,
    normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:
    """Divergence from the reference model as a loss: Σ w·kl / normalizer, see advantages.kl_estimate.

    The gradient is that of the estimate on tokens which the policy at experience time sampled; their shift since then
    is not corrected, as in GRPO. estimator, clip: those of kl_estimate.

    Returns:
        loss: scalar, nats; gradient into logprobs alone.
        metrics: kl_loss (mean over tokens, not weighted).
    """
    kl = kl_estimate(logprobs, ref_logprobs.detach(), estimator, response_mask=response_mask, clip=clip)
    return _weighted(kl, response_mask, "kl_loss", weights, normalizer)


def entropy_bonus(
    entropy: Tensor, response_mask: Tensor, *, weights: Tensor | None = None, normalizer: Normalizer = None
) -> tuple[Tensor, Metrics]:
    """Mean entropy of the distributions that tokens are drawn from, to be maximised: Σ w·H / normalizer.

    Args:
        entropy: [B, T] float, nats, with gradient.

    Returns:
        bonus: scalar, nats.
        metrics: entropy_bonus (mean over tokens, not weighted).

    Source: Schulman et al. 2017, eq. 9 (arXiv:1707.06347).
    """
    return _weighted(entropy, response_mask, "entropy_bonus", weights, normalizer)


def _weighted(
    values: Tensor, response_mask: Tensor, name: str, weights: Tensor | None, normalizer: Normalizer
) -> tuple[Tensor, Metrics]:
    require_mask(response_mask, values=values)
    count = count_of(response_mask, normalizer)
    kept = torch.where(response_mask, at_least_float32(values), 0.0)
    weighed = kept if weights is None else kept * weights
    return weighed.sum() / count, {name: kept.detach().sum() / count}
