"""Allocates contiguous runs of a KV pool to prompts and responses."""

from __future__ import annotations

from bisect import insort


class KVAllocator:
    """First-fit allocator of contiguous runs in a pool; `free` holds the free runs (start, length) in order."""

    def __init__(self, start: int, stop: int) -> None:
        self.free = [(start, stop - start)]

    def allocate(self, length: int) -> int | None:
        """Allocate a run of this length; returns its start, or None if no free run is long enough."""
        for index, (start, size) in enumerate(self.free):
            if size >= length:
                self.free[index : index + 1] = [(start + length, size - length)] if size > length else []
                return start
        return None

    def free_run(self, start: int, length: int) -> None:
        """Free a run and merge it with adjacent free runs."""
        insort(self.free, (start, length))
        index = self.free.index((start, length))
        for left in (index, index - 1):  # first the following run, then the preceding one
            if left >= 0 and left + 1 < len(self.free) and sum(self.free[left]) == self.free[left + 1][0]:
                self.free[left : left + 2] = [(self.free[left][0], self.free[left][1] + self.free[left + 1][1])]
