"""Forward passes over a rollout in micro-batches, the same number on all ranks under ZeRO-3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dschat.distributed.collectives import max_over_ranks


def forward_in_micro_batches(
    engine: nn.Module, *rows: Tensor, micro_batch_size: int | None, **settings: Any
) -> Tensor | tuple[Tensor, ...]:
    """engine(*rows, **settings) in micro-batches; the result is the same, since rows are independent.

    Under ZeRO-3 a collective: every rank runs as many forward passes as the rank with the most rows. A rank that has
    none left repeats its first row and discards the result.

    Args:
        engine: returns a tensor [B, …], or a tuple of such tensors.
        rows: tensors [B, …] with B ≥ 1, split along the first dimension.
        micro_batch_size: rows per forward pass; None: all rows.
        settings: keyword arguments of every forward pass.
    """
    total = len(rows[0])
    size = micro_batch_size or total
    starts = range(0, total, size)
    # First, so that all ranks run their collectives in the same order.
    repeated = _forwards_of_other_ranks(engine, len(starts))
    parts = [engine(*(tensor[start : start + size] for tensor in rows), **settings) for start in starts]
    for _ in range(repeated):
        engine(*(tensor[:1] for tensor in rows), **settings)
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))
    return torch.cat(parts)


def _forwards_of_other_ranks(engine: nn.Module, own_passes: int) -> int:
    """Number of forward passes that this rank has fewer than the rank with the most; 0 without ZeRO-3."""
    parameters = list(engine.parameters())
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):  # set by ZeRO-3
        return 0
    return int(max_over_ranks(torch.tensor(own_passes, device=parameters[0].device))) - own_passes
