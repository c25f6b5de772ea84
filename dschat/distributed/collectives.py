"""Rank, world size and collectives; with one process the collectives return their argument."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist

from dschat.distributed.launch_environment import is_first_of_node


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """True on rank 0, which writes files and logs."""
    return rank() == 0


def is_main_of_node() -> bool:
    """True on local rank 0 of each node."""
    return is_first_of_node(os.environ)


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def all_gather_objects(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every rank (of a group; None: of all), in rank order."""
    ranks = world_size() if group is None else dist.get_world_size(group)
    values = [value] * ranks
    if ranks > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast_from_main(value: Any) -> Any:
    """The main rank's value, on every rank."""
    values = [value]
    if world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def gather_lists_to_main(values: list[Any]) -> list[Any]:
    """As all_gather_lists, but only on the main rank, to save memory; other ranks get []."""
    if world_size() == 1:
        return list(values)
    parts: list[list[Any]] | None = [[]] * world_size() if is_main() else None
    dist.gather_object(values, parts, dst=0)
    return [value for part in parts or [] for value in part]


def all_gather_lists(values: list[Any]) -> list[Any]:
    """The lists of all ranks concatenated in rank order."""
    return [value for rank_values in all_gather_objects(values) for value in rank_values]


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Elementwise sum over all ranks, in float64; the argument is not modified."""
    total = value.detach().to(torch.float64, copy=True)
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def max_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Elementwise maximum over all ranks, in float64; the argument is not modified."""
    largest = value.detach().to(torch.float64, copy=True)
    if world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


@contextmanager
def main_of_node_first() -> Iterator[None]:
    """Local rank 0 of every node runs the block before the other ranks, which reuse the files that it prepares."""
    first = is_main_of_node()
    if not first:
        barrier()
    try:
        yield
    finally:
        if first:
            barrier()
