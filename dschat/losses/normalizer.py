"""Loss normalisation: every loss is divided by a count over the whole optimizer step.

A loss is a sum over tokens (or pairs) divided by `normalizer`: their number in the whole optimizer step,
over all micro-batches and ranks. Every metric is divided by the same number, so *summing* losses, gradients and
metrics over micro-batches and ranks gives the exact mean over the step, however the batch is split. normalizer=None
uses the number in this batch alone. A step in which nothing counts has loss 0 and zero gradients, never NaN.

Masks are bool, True means "counts"; values at False positions, NaN and inf included, affect neither value nor
gradient. Inputs of any precision are computed in float32 (float64 stays). Metrics are detached scalar tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

Normalizer = float | Tensor | None
Metrics = dict[str, Tensor]


def count_of(mask: Tensor, normalizer: Normalizer) -> float | Tensor:
    """The divisor of a loss: normalizer, or the number of True positions in mask; 1 if it is 0, so 0/0 is 0."""
    return divisor(mask.sum() if normalizer is None else normalizer)


def divisor(count: float | Tensor) -> float | Tensor:
    """The count, or 1 in place of 0. Raises ValueError for a negative number."""
    if isinstance(count, Tensor):
        return torch.where(count == 0, 1, count)
    if count < 0:
        raise ValueError(f"normalizer is {count}, but it counts tokens or pairs of the step, so it must be ≥ 0.")
    return count or 1.0
