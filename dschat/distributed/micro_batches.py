"""Forward passes over a rollout in micro-batches, in step with the other ranks where weights are partitioned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dschat.distributed.collectives import max_over_ranks


def forward_in_micro_batches(
    engine: nn.Module, *rows: Tensor, micro_batch_size: int | None, **settings: Any
) -> Tensor | tuple[Tensor, ...]:
    """engine(*rows, **settings), a few rows at a time; rows do not depend on each other, so the result is the same.

    Under ZeRO-3 a collective: every rank runs as many forward passes as the rank with the most rows. One that has none
    left runs its first row again, and drops the result.

    Args:
        engine: returns a tensor whose first dimension are the rows, or a tuple of such.
        rows: tensors [B, …] with B ≥ 1, cut along the first dimension.
        micro_batch_size: rows of a forward pass; None: all.
        settings: given to every forward pass as they are.
    """
    total = len(rows[0])
    size = micro_batch_size or total
    starts = range(0, total, size)
    repeated = _forwards_of_other_ranks(engine, len(starts))  # before the first pass: its order among collectives
    parts = [engine(*(tensor[start : start + size] for tensor in rows), **settings) for start in starts]
    for _ in range(repeated):
        engine(*(tensor[:1] for tensor in rows), **settings)
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))
    return torch.cat(parts)


def _forwards_of_other_ranks(engine: nn.Module, mine: int) -> int:
    """How many forward passes some rank runs beyond this rank's, where ranks have to run equally many."""
    parameters = list(engine.parameters())
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):  # ZeRO-3 marks what it owns by it
        return 0
    return int(max_over_ranks(torch.tensor(mine, device=parameters[0].device))) - mine
