"""Losses of the three steps: plain functions of tensors, each → (loss, metrics).

Normaliser. A loss is a sum over tokens (or pairs) divided by `normalizer`: their number in the whole optimizer step,
over all micro-batches and ranks. Every metric is divided by the same number, so *summing* losses, gradients and
metrics over micro-batches and ranks gives the exact mean over the step, however the batch was cut. normalizer=None
means the number in this batch alone. A step in which nothing counts has loss 0 and zero gradients, never NaN.

Masks are bool, True means "counts"; what stands under False, NaN and inf included, changes neither value nor
gradient. Inputs of any precision are computed in float32 (float64 stays). Metrics are detached scalar tensors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat.tensors import LOG_RATIO_LIMIT, at_least_float32, require_mask

Normalizer = float | Tensor | None
Metrics = dict[str, Tensor]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_range: float | tuple[float, float],
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate, to be minimised: Σ w·max(−A·ρ, −A·clip(ρ, 1 − low, 1 + high)) / normalizer.

    Args:
        logprobs: [B, T] float, of the policy being trained; the only input that receives a gradient.
        old_logprobs: [B, T] float, of the policy that the experience was taken with.
        advantages: [B, T] float.
        response_mask: [B, T] bool, True on generated tokens.
        clip_range: ε for both sides, or (low, high); 0 ≤ low ≤ 1, high ≥ 0.
        dual_clip: c > 1 bounds the loss of tokens with A < 0 by −c·A, however large their ratio; None does not.
        weights: [B, T] float, w of each token (see off_policy.correction_weights and
            policy_losses.aggregation_weights), a constant; None is 1.
        normalizer: response tokens of the whole step (see the top of this module).

    Returns:
        loss: scalar.
        metrics: clip_fraction (share of tokens whose clipped branch is the strictly larger one, so their gradient
            is zero), approx_kl (k3 of old against new, nats per token), ratio (mean ρ), with dual_clip
            dual_clip_fraction (share of tokens that it bounds); none of them is weighted.

    Raises:
        ValueError: shapes that differ, a mask that is not bool, a clip_range, dual_clip or normalizer out of range.

    Source: Schulman et al. 2017, eq. 7 (arXiv:1707.06347); two-sided clip_range: DAPO, section 3.1 (arXiv:2503.14476);
        dual clip: Ye et al. 2020, eq. 5 (arXiv:1912.09729).
    """
    low, high = bounds(clip_range)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}, but it bounds ratios from above, so it must be > 1: 3 is usual.")
    log_ratio, advantages, weights = policy_inputs(logprobs, old_logprobs, advantages, response_mask, weights)
    count = count_of(response_mask, normalizer)
    per_token, cut = clipped_surrogate(log_ratio.exp(), advantages, low, high)
    metrics = policy_metrics(log_ratio, cut, response_mask, count)
    if dual_clip is not None:
        bound = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        metrics["dual_clip_fraction"] = (per_token > bound).sum() / count
        per_token = torch.minimum(per_token, bound)
    return (weights * per_token).sum() / count, metrics


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """[B, T] max(−A·ρ, −A·clip(ρ, 1 − low, 1 + high)), and [B, T] bool where the clipped branch is strictly larger."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def bounds(clip_range: float | tuple[float, float]) -> tuple[float, float]:
    """(low, high) of a ratio's clipping to [1 − low, 1 + high].

    Raises:
        ValueError: out of range.
    """
    low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(
            f"clip_range is {clip_range}, but the ratio is clipped to [1 − low, 1 + high], which asks for "
            "0 ≤ low ≤ 1 and high ≥ 0: 0.2 is usual."
        )
    return low, high


def policy_inputs(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T] log ratio (with gradient into logprobs, within ±20), advantages and weights, 0 where the mask is False.

    Raises:
        ValueError: shapes that differ, a mask that is not bool.
    """
    weights = torch.ones_like(advantages) if weights is None else weights
    require_mask(response_mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
    # The mask comes before exp: inf·0 in the backward pass would be NaN.
    log_ratio = torch.where(response_mask, at_least_float32(logprobs) - at_least_float32(old_logprobs).detach(), 0.0)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    advantages = torch.where(response_mask, at_least_float32(advantages).detach(), 0.0)
    return log_ratio, advantages, torch.where(response_mask, at_least_float32(weights).detach(), 0.0)


@torch.no_grad()
def policy_metrics(log_ratio: Tensor, cut: Tensor, response_mask: Tensor, count: float | Tensor) -> Metrics:
    """What every policy loss says: clip_fraction, approx_kl and ratio (see policy_loss).

    Args:
        log_ratio: [B, T] float, of tokens, 0 where the mask is False.
        cut: [B, T] bool, True on tokens that clipping keeps from being learnt.
    """
    return {
        "clip_fraction": cut.sum() / count,
        "approx_kl": (torch.expm1(log_ratio) - log_ratio).sum() / count,
        "ratio": torch.where(response_mask, log_ratio.exp(), 0.0).sum() / count,
    }


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    value_clip_range: float | None,
    normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:
    """Clipped value regression: Σ ½·max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²) / normalizer.

    Args:
        values: [B, T] float, of the critic being trained; the only input that receives a gradient.
        old_values: [B, T] float, of the critic at experience time.
        returns: [B, T] float, the targets.
        response_mask: [B, T] bool, True on generated tokens.
        value_clip_range: ε ≥ 0, in units of reward; None does not clip.
        normalizer: response tokens of the whole step (see the top of this module).

    Returns:
        loss: scalar.
        metrics: value_clip_fraction (share of tokens whose clipped branch is the strictly larger one), value_mean,
            return_mean, value_error (mean (V − R)²), return_square (mean R²); the last four, summed over the step,
            are what explained_variance takes.

    Raises:
        ValueError: shapes that differ, a mask that is not bool, a value_clip_range or normalizer out of range.

    Source: Schulman et al. 2017, eq. 9 (arXiv:1707.06347); its clipping:
        Engstrom et al. 2020 (arXiv:2005.12729).
    """
    require_mask(response_mask, values=values, old_values=old_values, returns=returns)
    if value_clip_range is not None and not value_clip_range >= 0:
        raise ValueError(f"value_clip_range is {value_clip_range}, but it bounds |V − V_old|, so ≥ 0: None is none.")
    count = count_of(response_mask, normalizer)
    values = torch.where(response_mask, at_least_float32(values), 0.0)
    old_values = torch.where(response_mask, at_least_float32(old_values).detach(), 0.0)
    returns = torch.where(response_mask, at_least_float32(returns).detach(), 0.0)
    unclipped = (values - returns).square()  # [B, T]
    clipped = unclipped
    if value_clip_range is not None:
        near_old = old_values + (values - old_values).clamp(-value_clip_range, value_clip_range)
        clipped = (near_old - returns).square()
    loss = 0.5 * torch.maximum(unclipped, clipped).sum() / count
    with torch.no_grad():
        metrics = {
            "value_clip_fraction": (clipped > unclipped).sum() / count,
            "value_mean": values.sum() / count,
            "return_mean": returns.sum() / count,
            "value_error": unclipped.sum() / count,
            "return_square": returns.square().sum() / count,
        }
    return loss, metrics


def explained_variance(metrics: Metrics) -> Tensor:
    """Share of the returns' variance that the critic predicts: 1 − Var(R − V) / Var(R).

    Args:
        metrics: those of value_loss, already summed over every micro-batch and rank of the step. (It does not add up
            itself, so it comes last.)

    Returns:
        scalar: 1 is perfect, 0 no better than a constant, negative worse; 0 where all returns are equal.
    """
    mean_error = metrics["return_mean"] - metrics["value_mean"]
    error_variance = metrics["value_error"] - mean_error.square()
    variance = metrics["return_square"] - metrics["return_mean"].square()
    # E[R²] − E[R]² of equal returns is rounding noise, not exactly 0.
    varied = variance > 1e-6 * metrics["return_square"]
    return torch.where(varied, 1 - error_variance / variance, 0.0)


def pairwise_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    margin: Tensor | None = None,
    centering_coef: float = 0.0,
    normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:
    """Bradley–Terry loss of a reward model: Σ (−log σ(c − r − margin) + coef·(c + r)²) / normalizer.

    Args:
        chosen_scores, rejected_scores: [B] float, one score per sequence, at its last real token.
        margin: [B] float, how much better the chosen one is, in units of score; None is 0.
        centering_coef: weight that keeps scores centred at 0, which the pairs alone leave open.
        normalizer: pairs of the whole step (see the top of this module).

    Returns:
        loss: scalar.
        metrics: accuracy (share of pairs with c > r; margin plays no part, a tie is wrong), chosen_score,
            rejected_score, margin (mean c − r).

    Raises:
        ValueError: shapes that differ, a normalizer out of range.

    Source: Ouyang et al. 2022, eq. 1 (arXiv:2203.02155); margin: Touvron et al. 2023, eq. 2 (arXiv:2307.09288);
        centring: Eisenstein et al. 2023 (arXiv:2312.09244).
    """
    pairs = {"chosen_scores": chosen_scores, "rejected_scores": rejected_scores}
    if margin is not None:
        pairs["margin"] = margin
    if chosen_scores.dim() != 1 or len({x.shape for x in pairs.values()}) != 1:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in pairs.items())
        raise ValueError(f"{shapes}: all must be [B], one number per pair: read scores at their last real token first.")
    count = count_of(torch.ones_like(chosen_scores, dtype=torch.bool), normalizer)
    chosen, rejected = at_least_float32(chosen_scores), at_least_float32(rejected_scores)
    lead = chosen - rejected if margin is None else chosen - rejected - at_least_float32(margin)
    loss = (-F.logsigmoid(lead) + centering_coef * (chosen + rejected).square()).sum() / count
    with torch.no_grad():
        metrics = {
            "accuracy": (chosen > rejected).sum() / count,
            "chosen_score": chosen.sum() / count,
            "rejected_score": rejected.sum() / count,
            "margin": (chosen - rejected).sum() / count,
        }
    return loss, metrics


def sft_loss(logprobs: Tensor, loss_mask: Tensor, *, normalizer: Normalizer = None) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the trained tokens: −Σ logprob / normalizer.

    Args:
        logprobs: [B, S] float, log-prob of token i given the tokens before it.
        loss_mask: [B, S] bool, True on tokens to be learnt (the closing EOS too).
        normalizer: trained tokens of the whole step (see the top of this module).

    Returns:
        loss: scalar.
        metrics: nll, the same number detached, nats per token; perplexity is exp of its sum over the step.

    Raises:
        ValueError: shapes that differ, a mask that is not bool, a normalizer out of range.
    """
    require_mask(loss_mask, logprobs=logprobs)
    loss = -torch.where(loss_mask, at_least_float32(logprobs), 0.0).sum() / count_of(loss_mask, normalizer)
    return loss, {"nll": loss.detach()}


def count_of(mask: Tensor, normalizer: Normalizer) -> float | Tensor:
    """The divisor of a loss: normalizer, or the True positions of mask; 1 where either is 0, so 0/0 is 0."""
    count = mask.sum() if normalizer is None else normalizer
    if isinstance(count, Tensor):
        return torch.where(count == 0, 1, count)
    if count < 0:
        raise ValueError(f"normalizer is {count}, but it is the number of tokens or pairs of the step, so ≥ 0.")
    return count or 1.0
