"""Process groups: data parallel ranks read different rows, sequence parallel ranks share the tokens of the same rows.

With S sequence parallel ranks, global rank r is sequence parallel rank r mod S of data parallel rank ⌊r / S⌋, so that
adjacent ranks, which have the fastest links, share rows. Without groups S is 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import distributed as dist

from dschat.distributed import collectives


@dataclass(frozen=True)
class _Groups:
    sequence_parallel_size: int
    data_parallel: dist.ProcessGroup | None
    sequence_parallel: dist.ProcessGroup | None


_NO_GROUPS = _Groups(1, None, None)
_current = _NO_GROUPS


def create_groups(*, sequence_parallel_size: int = 1) -> None:
    """Create the process groups; a collective if sequence_parallel_size > 1.

    Raises:
        ValueError: the size does not divide the world size.
    """
    global _current
    world, size = collectives.world_size(), sequence_parallel_size
    if size < 1 or world % size:
        raise ValueError(f"sequence_parallel_size {size} must divide the {world} processes of the run")
    _current = _NO_GROUPS
    if size > 1:
        # new_group is a collective over all ranks, members or not.
        rows = [dist.new_group(list(range(start, start + size))) for start in range(0, world, size)]
        columns = [dist.new_group(list(range(start, world, size))) for start in range(size)]
        rank = collectives.rank()
        _current = _Groups(size, columns[rank % size], rows[rank // size])


def data_parallel_rank() -> int:
    """Index of the share of the rows that this rank reads."""
    return collectives.rank() // _current.sequence_parallel_size


def data_parallel_size() -> int:
    """Number of shares into which the rows are split."""
    return collectives.world_size() // _current.sequence_parallel_size


def data_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that compute the same part of different rows; None: all ranks."""
    return _current.data_parallel


def sequence_parallel_rank() -> int:
    """Index of the part of its rows' tokens that this rank computes."""
    return collectives.rank() % _current.sequence_parallel_size


def sequence_parallel_size() -> int:
    return _current.sequence_parallel_size


def sequence_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that share this rank's rows; None: only this rank."""
    return _current.sequence_parallel
