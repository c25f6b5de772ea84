"""Ranks, and the collectives between them; in a run of one process they return their argument."""

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
    """True on the one rank that writes files and speaks."""
    return rank() == 0


def is_main_of_node() -> bool:
    """True on one rank of each node."""
    return is_first_of_node(os.environ)


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def all_gather_objects(value: Any) -> list[Any]:
    """The value of every rank, in their order."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def broadcast_from_main(value: Any) -> Any:
    """The main rank's value, on every rank."""
    values = [value]
    if world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def gather_lists_to_main(values: list[Any]) -> list[Any]:
    """What all_gather_lists gives, on the main rank; [] on the others, which never hold all of it."""
    if world_size() == 1:
        return list(values)
    parts: list[list[Any]] | None = [[]] * world_size() if is_main() else None
    dist.gather_object(values, parts, dst=0)
    return [value for part in parts or [] for value in part]


def all_gather_lists(values: list[Any]) -> list[Any]:
    """The entries of every rank's list in one list, rank after rank."""
    return [value for of_rank in all_gather_objects(values) for value in of_rank]


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all ranks, in float64; the argument is left as it was."""
    total = value.detach().to(torch.float64, copy=True)
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def max_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The largest of a tensor's entries over all ranks, entry by entry, in float64; the argument is left as it was."""
    largest = value.detach().to(torch.float64, copy=True)
    if world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


@contextmanager
def main_of_node_first() -> Iterator[None]:
    """The first process of every node runs the block before the others: it prepares files that they then reuse."""
    first = is_main_of_node()
    if not first:
        barrier()
    try:
        yield
    finally:
        if first:
            barrier()
