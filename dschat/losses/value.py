"""Critic losses: clipped value regression, and the explained variance of the returns."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.losses.normalizer import Metrics, Normalizer, count_of
from dschat.tensors import at_least_float32, require_mask


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
        value_clip_range: ε ≥ 0, in units of reward; None disables clipping.
        normalizer: response tokens of the whole step (see dschat.losses.normalizer).

    Returns:
        loss: scalar.
        metrics: value_clip_fraction (share of tokens whose clipped branch is the strictly larger one), value_mean,
            return_mean, value_error (mean (V − R)²), return_square (mean R²); the last four, summed over the step,
            are the inputs of explained_variance.

    Raises:
        ValueError: shapes that differ, a mask that is not bool, a value_clip_range or normalizer out of range.

    Source: Schulman et al. 2017, eq. 9 (arXiv:1707.06347); its clipping:
        Engstrom et al. 2020 (arXiv:2005.12729).
    """
    require_mask(response_mask, values=values, old_values=old_values, returns=returns)
    if value_clip_range is not None and not value_clip_range >= 0:
        raise ValueError(
            f"value_clip_range is {value_clip_range}, but it bounds |V − V_old|, so it must be ≥ 0; None disables it."
        )
    count = count_of(response_mask, normalizer)
    values = torch.where(response_mask, at_least_float32(values), 0.0)
    old_values = torch.where(response_mask, at_least_float32(old_values).detach(), 0.0)
    returns = torch.where(response_mask, at_least_float32(returns).detach(), 0.0)
    unclipped = (values - returns).square()  # [B, T]
    clipped = unclipped
    if value_clip_range is not None:
        clipped_values = old_values + (values - old_values).clamp(-value_clip_range, value_clip_range)
        clipped = (clipped_values - returns).square()
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
        metrics: those of value_loss, already summed over all micro-batches and ranks of the step. (The result itself
            cannot be summed.)

    Returns:
        scalar: 1 is perfect, 0 no better than a constant, negative worse; 0 where all returns are equal.
    """
    mean_error = metrics["return_mean"] - metrics["value_mean"]
    error_variance = metrics["value_error"] - mean_error.square()
    variance = metrics["return_square"] - metrics["return_mean"].square()
    # E[R²] − E[R]² of equal returns is a rounding error, not exactly 0.
    has_variance = variance > 1e-6 * metrics["return_square"]
    return torch.where(has_variance, 1 - error_variance / variance, 0.0)
