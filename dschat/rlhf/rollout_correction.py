"""Log-prob mismatch between rollout engine and trained policy: its metrics, and importance weights that correct it.

Δ = log π_actor − log π_rollout of each sampled token, with the same model weights. It is nonzero by rounding alone,
noticeably in bf16; with a truncated distribution (top-p, top-k) it is the log of the probability mass that was kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dschat.distributed.collectives import max_over_ranks
from dschat.distributed.engines import Metrics, sum_metrics
from dschat.losses.normalizer import Normalizer, count_of
from dschat.tensors import LOG_RATIO_LIMIT, at_least_float32, require_mask

CORRECTIONS = ("tis", "mis", "seq_tis", "seq_mis")


def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    correction: str,
    cap: float,
    floor: float = 0.0,
    normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:
    """Bounded importance weights of tokens that another policy sampled, w = π_old / π_rollout.

    "tis" truncates each token's weight to at most cap; "mis" masks tokens whose weight is outside [floor, cap] and
    keeps the other weights. "seq_tis" and "seq_mis" do the same with the weight of the whole response, the product
    over its tokens, applied to every token: unbiased where the bounds do not apply, but with a variance that grows
    with length.

    Args:
        old_logprobs: [B, T] float, of the target policy.
        rollout_logprobs: [B, T] float, of the sampling policy.
        response_mask: [B, T] bool, True on generated tokens.
        correction: one of CORRECTIONS.
        cap: > 0; bounds the variance at the cost of bias. 2 in verl.
        floor: in [0, cap); used by "mis" and "seq_mis" only. 0.5 in OpenRLHF.
        normalizer: response tokens of the whole step (see dschat.losses.normalizer); None: those of this batch.

    Returns:
        weights: [B, T] float32 without gradient, 0 where the mask is False.
        metrics: correction_weight (mean w), correction_cut (share of tokens that the bounds changed).

    Raises:
        ValueError: shapes that differ, a mask that is not bool, an unknown correction, bounds out of range.

    Source: Ionides 2008, Truncated Importance Sampling (J. Comput. Graph. Stat. 17:2); per token, between decoder and
        trainer: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training
        (fengyao.notion.site/off-policy-rl); masks and whole responses: Liu et al. 2025, When Speed Kills Stability
        (richardli.xyz/rl-collapse).
    """
    if correction not in CORRECTIONS:
        raise ValueError(f'correction "{correction}" is not known: choose one of {", ".join(CORRECTIONS)}.')
    masks = correction.endswith("mis")
    if not cap > 0 or (masks and not 0 <= floor < cap):
        raise ValueError(f"floor is {floor} and cap {cap}, but weights are kept within 0 <= floor < cap: 2 is usual.")
    delta = _log_ratio(old_logprobs, rollout_logprobs, response_mask)  # [B, T]
    if correction.startswith("seq"):
        delta = delta.sum(-1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expand_as(delta)
    ratio = delta.exp()
    outside = ratio > cap
    if masks:
        outside = outside | (ratio < floor)
        weights = torch.where(outside, 0.0, ratio)
    else:
        weights = ratio.clamp(max=cap)
    weights = torch.where(response_mask, weights, 0.0)
    count = count_of(response_mask, normalizer)
    cut = response_mask & outside
    return weights, {"correction_weight": weights.sum() / count, "correction_cut": cut.sum() / count}


def rollout_logprob_mismatch(logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor) -> Metrics:
    """Sums over one rank's batch, input of `mismatch_metrics`.

    Args:
        logprobs: [B, T] float, of the actor, with the model weights that sampled.
        rollout_logprobs: [B, T] float, of the decoder.
        response_mask: [B, T] bool, True on generated tokens.

    Returns:
        tokens, rollout_logprob_mismatch_mean (Σ|Δ|), rollout_ratio (Σ e^Δ), rollout_logprob_mismatch_max (max |Δ|; 0
        without tokens), float64.

    Raises:
        ValueError: shapes that differ, a mask that is not bool.
    """
    delta = _log_ratio(logprobs, rollout_logprobs, response_mask).double()  # [B, T]
    return {
        "tokens": response_mask.sum().double(),
        "rollout_logprob_mismatch_mean": delta.abs().sum(),
        "rollout_ratio": torch.where(response_mask, delta.exp(), 0.0).sum(),
        "rollout_logprob_mismatch_max": delta.abs().max(),
    }


def mismatch_metrics(parts: Sequence[Metrics]) -> dict[str, float]:
    """Log-prob mismatch over the batches of all ranks. A collective; every rank passes at least one batch.

    Returns: rollout_logprob_mismatch_mean (mean |Δ|) and rollout_logprob_mismatch_max (max |Δ|), nats; rollout_ratio
        (mean π_actor / π_rollout).
    """
    summed = ("tokens", "rollout_logprob_mismatch_mean", "rollout_ratio")
    total = sum_metrics({name: sum(part[name] for part in parts) for name in summed})
    largest = max_over_ranks(torch.stack([part["rollout_logprob_mismatch_max"] for part in parts]).max())
    tokens = max(total["tokens"], 1.0)
    return {
        "rollout_logprob_mismatch_mean": total["rollout_logprob_mismatch_mean"] / tokens,
        "rollout_logprob_mismatch_max": float(largest),
        "rollout_ratio": total["rollout_ratio"] / tokens,
    }


def _log_ratio(logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """[B, T] Δ without gradient, clamped to ± LOG_RATIO_LIMIT, 0 where the mask is False."""
    require_mask(response_mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    delta = at_least_float32(logprobs).detach() - at_least_float32(rollout_logprobs).detach()
    return torch.where(response_mask, delta, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
