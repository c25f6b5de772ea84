"""Log-prob mismatch between rollout engine and trained policy, measured with the same model weights.

Δ = log π_actor − log π_rollout of each sampled token. It is nonzero by rounding alone, noticeably in bf16; with a
truncated distribution (top-p, top-k) it is the log of the probability mass that was kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dschat.distributed.collectives import max_over_ranks
from dschat.distributed.engines import Metrics, sum_metrics
from dschat.tensors import LOG_RATIO_LIMIT, at_least_float32, require_mask


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
    delta = log_ratio(logprobs, rollout_logprobs, response_mask).double()  # [B, T]
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


def log_ratio(logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """[B, T] Δ without gradient, clamped to ± LOG_RATIO_LIMIT, 0 where the mask is False."""
    require_mask(response_mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    delta = at_least_float32(logprobs).detach() - at_least_float32(rollout_logprobs).detach()
    return torch.where(response_mask, delta, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
