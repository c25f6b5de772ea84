"""Token-budget micro-batches: which rows of a step one forward pass reads. Pure integer arithmetic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class _Bin:
    """A micro-batch while it is filled; bins are ordered by cost, then by number."""

    cost: float
    number: int
    tokens: int = 0
    items: list[int] = field(default_factory=list)

    def __lt__(self, other: _Bin) -> bool:
        return (self.cost, self.number) < (other.cost, other.number)


def token_cost(length: int, *, quadratic: float = 0.0) -> float:
    """Cost of a sequence of this length: length + quadratic · length², in units of one token's linear layers.

    Args:
        quadratic: attention against linear layers: for hidden size H about 1 / (6·H).
    """
    return length + quadratic * length * length


def micro_batch_count(lengths: Sequence[int], budget: int) -> int:
    """Micro-batches that first-fit-decreasing needs; at most 11/9 of the optimum plus one.

    Args:
        lengths: tokens of each row.
        budget: tokens per micro-batch; a row that exceeds it alone is its own micro-batch.

    Source: Johnson 1973, "Near-optimal bin packing algorithms".
    """
    return len(_first_fit_decreasing(lengths, budget))


def split_by_tokens(
    lengths: Sequence[int], budget: int, *, count: int | None = None, quadratic: float = 0.0
) -> list[list[int]]:
    """Cut rows into micro-batches of at most `budget` tokens with costs as equal as possible.

    Longest rows first, each to the cheapest micro-batch that has room for it; where that does not fit, the
    first-fit-decreasing micro-batches are kept, as they always fit.

    Args:
        lengths: tokens of each row, at least 1.
        budget: tokens per micro-batch; a row that exceeds it alone is its own micro-batch.
        count: number of micro-batches, at least micro_batch_count(lengths, budget) (ranks agree on the largest);
            those beyond the number of rows are empty. None: micro_batch_count.
        quadratic: see token_cost.

    Returns: row indices of each micro-batch, ascending; `count` lists.

    Raises:
        ValueError: count is too small.
    """
    fitted = _first_fit_decreasing(lengths, budget)
    count = len(fitted) if count is None else count
    if count < len(fitted):
        raise ValueError(f"{len(lengths)} rows need {len(fitted)} micro-batches of {budget} tokens, not {count}")
    bins = [_Bin(0.0, number) for number in range(count)]
    for row in _longest_first(lengths):
        full = []
        while bins and bins[0].items and bins[0].tokens + lengths[row] > budget:
            full.append(heapq.heappop(bins))
        if not bins:
            return [sorted(part) for part in fitted] + [[] for _ in range(count - len(fitted))]
        bins[0].tokens += lengths[row]
        bins[0].cost += token_cost(lengths[row], quadratic=quadratic)
        bins[0].items.append(row)
        heapq.heapreplace(bins, bins[0])
        for other in full:
            heapq.heappush(bins, other)
    return [sorted(part.items) for part in sorted(bins, key=lambda part: part.number)]


def balance_over_ranks(lengths: Sequence[int], ranks: int, *, quadratic: float = 0.0) -> list[list[int]]:
    """Assign equally many rows to each rank, with costs as equal as possible: longest first to the cheapest rank.

    Args:
        lengths: tokens of each row of the global batch; their number is a multiple of `ranks`.

    Returns: row indices of each rank, ascending.
    """
    share = len(lengths) // ranks
    parts = [_Bin(0.0, number) for number in range(ranks)]
    full: list[_Bin] = []
    for row in _longest_first(lengths):
        part = heapq.heappop(parts)
        part.cost += token_cost(lengths[row], quadratic=quadratic)
        part.items.append(row)
        if len(part.items) == share:
            full.append(part)
        else:
            heapq.heappush(parts, part)
    return [sorted(part.items) for part in sorted(full, key=lambda part: part.number)]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def _first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    parts: list[list[int]] = []
    room: list[int] = []
    for row in _longest_first(lengths):
        number = next((i for i, left in enumerate(room) if left >= lengths[row]), None)
        if number is None:
            parts.append([])
            room.append(budget)
            number = len(parts) - 1
        parts[number].append(row)
        room[number] -= lengths[row]
    return parts
