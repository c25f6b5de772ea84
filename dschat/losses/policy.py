"""Policy losses over the response tokens; dschat.losses.policy_table has the table of --policy_loss.

All ratios are ρ = π / π_old, of the policy being trained to the policy at experience time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.losses.normalizer import Metrics, Normalizer, count_of
from dschat.tensors import LOG_RATIO_LIMIT, at_least_float32, require_mask


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
        old_logprobs: [B, T] float, of the policy at experience time.
        advantages: [B, T] float.
        response_mask: [B, T] bool, True on generated tokens.
        clip_range: ε for both sides, or (low, high); 0 ≤ low ≤ 1, high ≥ 0.
        dual_clip: c > 1 bounds the loss of tokens with A < 0 by −c·A, however large their ratio; None disables it.
        weights: [B, T] float, w of each token (see rollout_correction.correction_weights and
            aggregation.aggregation_weights), without gradient; None is 1.
        normalizer: response tokens of the whole step (see dschat.losses.normalizer).

    Returns:
        loss: scalar.
        metrics: clip_fraction (share of tokens whose clipped branch is the strictly larger one, so their gradient
            is zero), approx_kl (k3 of KL(old ‖ new), nats per token), ratio (mean ρ), and with dual_clip
            dual_clip_fraction (share of tokens that it bounds); all unweighted.

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
    per_token, is_clipped = clipped_surrogate(log_ratio.exp(), advantages, low, high)
    metrics = policy_metrics(log_ratio, is_clipped, response_mask, count)
    if dual_clip is not None:
        bound = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        metrics["dual_clip_fraction"] = (per_token > bound).sum() / count
        per_token = torch.minimum(per_token, bound)
    return (weights * per_token).sum() / count, metrics


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
    """PPO's surrogate with sequence-level ratios: s_i = exp(mean over tokens of log ρ), clipped per response.

    This is the token-level form, GSPO-token: s_it = sg[s_i]·π_it / sg[π_it], whose value is s_i and whose gradient
    flows only through token t. With one advantage per response and "seq_mean_token_mean" it equals the sequence form,
    gradient included.

    Args, returns, raises: as policy_loss; clip_fraction is the share of tokens in clipped responses. A
        response's ratio varies far less than a token's, so clip_range is small: 3e-4 and 4e-4 in the paper.

    Source: Zheng et al. 2025, eqs. 5, 7, 13 and 14 (arXiv:2507.18071).
    """
    low, high = bounds(clip_range)
    log_ratio, advantages, weights = policy_inputs(logprobs, old_logprobs, advantages, response_mask, weights)
    count = count_of(response_mask, normalizer)
    length = response_mask.sum(-1, keepdim=True).clamp(min=1)
    log_sequence = (log_ratio.sum(-1, keepdim=True) / length).detach()  # [B, 1]
    ratio = (log_sequence + log_ratio - log_ratio.detach()).exp()  # [B, T]
    per_token, is_clipped = clipped_surrogate(ratio, advantages, low, high)
    loss = (weights * per_token).sum() / count
    return loss, policy_metrics(log_ratio.detach(), is_clipped, response_mask, count)


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

    Every token keeps its gradient; only its weight is bounded. The paper bounds it only from above: low = 1. (verl
    clips on both sides of 1; TRL's setting is the upper bound itself: its 5 is high = 4 here.)

    Args, returns, raises: as policy_loss; clip_fraction is the share of tokens whose weight was clipped.

    Source: MiniMax 2025 (MiniMax-M1), eqs. 4 and 5 (arXiv:2506.13585).
    """
    low, high = bounds(clip_range)
    log_ratio, advantages, weights = policy_inputs(logprobs, old_logprobs, advantages, response_mask, weights)
    count = count_of(response_mask, normalizer)
    ratio = log_ratio.detach().exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    masked_logprobs = torch.where(response_mask, at_least_float32(logprobs), 0.0)
    loss = (-weights * clipped * advantages * masked_logprobs).sum() / count
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

    Args, returns, raises: as policy_loss; clip_fraction is the share of tokens whose slope fell below half.
        positive_temperature, negative_temperature: τ > 0 of tokens with A > 0, and of the others; a larger one
            attenuates off-policy tokens faster. 1.0 and 1.05 in the paper.

    Source: Gao et al. 2025, section 3 (arXiv:2511.20347).
    """
    if not (positive_temperature > 0 and negative_temperature > 0):
        raise ValueError(
            f"the temperatures are {positive_temperature} and {negative_temperature}, but must be > 0."
        )
    log_ratio, advantages, weights = policy_inputs(logprobs, old_logprobs, advantages, response_mask, weights)
    count = count_of(response_mask, normalizer)
    temperature = torch.where(advantages > 0, positive_temperature, negative_temperature)
    gate = torch.sigmoid(temperature * (log_ratio.exp() - 1))  # [B, T]
    loss = (-weights * advantages * 4 / temperature * gate).sum() / count
    slope = (4 * gate * (1 - gate)).detach()
    return loss, policy_metrics(log_ratio.detach(), response_mask & (slope < 0.5), response_mask, count)


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
            f"clip_range is {clip_range}, but the ratio is clipped to [1 − low, 1 + high], which requires "
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
def policy_metrics(log_ratio: Tensor, is_clipped: Tensor, response_mask: Tensor, count: float | Tensor) -> Metrics:
    """The metrics common to all policy losses: clip_fraction, approx_kl and ratio (see policy_loss).

    Args:
        log_ratio: [B, T] float, per token, 0 where the mask is False.
        is_clipped: [B, T] bool, True on clipped tokens.
    """
    return {
        "clip_fraction": is_clipped.sum() / count,
        "approx_kl": (torch.expm1(log_ratio) - log_ratio).sum() / count,
        "ratio": torch.where(response_mask, log_ratio.exp(), 0.0).sum() / count,
    }
