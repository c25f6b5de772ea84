"""Token-budget micro-batches: which rows of a step one forward pass reads. Pure integer arithmetic.

Rows are balanced by cost, tokens + quadratic · tokens², so that the ranks and micro-batches of a step take equally
long. A micro-batch never has more tokens than its budget; only a row that exceeds it alone does.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Prompts = Sequence[tuple[Sequence[int], int]]  # rows with the same prompt, and its length in tokens


@dataclass(frozen=True)
class Unit:
    """Rows that are computed together, and their tokens: a shared prompt counts once."""

    rows: tuple[int, ...]
    tokens: int


def rows_as_units(lengths: Sequence[int], *, prompts: Prompts = (), budget: int) -> list[Unit]:
    """The rows of a step as units; a group too large for the budget is split, each part with the prompt.

    Args:
        lengths: tokens of each row.
        prompts: groups of rows that share a prompt; the others are units of their own.
    """
    units, grouped = [], set()
    for rows, prompt in prompts:
        grouped.update(rows)
        part: list[int] = []
        tokens = prompt
        for row in sorted(rows, key=lambda row: (lengths[row], row)):
            if part and tokens + lengths[row] - prompt > budget:
                units.append(Unit(tuple(part), tokens))
                part, tokens = [], prompt
            part.append(row)
            tokens += lengths[row] - prompt
        units.append(Unit(tuple(part), tokens))
    units += [Unit((row,), length) for row, length in enumerate(lengths) if row not in grouped]
    return units


def split_units(
    units: Sequence[Unit], budget: int, *, count: int | None = None, quadratic: float = 0.0
) -> list[list[int]]:
    """Cut units into micro-batches of at most `budget` tokens with costs as equal as possible.

    Longest units first, each to the cheapest micro-batch that has room for it; where one finds no room, the
    micro-batches of first-fit-decreasing, which always fit.

    Args:
        count: number of micro-batches, at least fewest(units, budget) (ranks agree on the largest); None: that.
        quadratic: see the module.

    Returns: the rows of each micro-batch, ascending; `count` lists, those beyond the number of units empty.

    Raises:
        ValueError: count is too small.
    """
    fitted = _first_fit_decreasing(units, budget)
    count = len(fitted) if count is None else count
    if count < len(fitted):
        raise ValueError(f"{len(units)} rows need {len(fitted)} micro-batches of {budget} tokens, not {count}")
    balanced = _longest_to_cheapest(units, budget, count, quadratic)
    parts = fitted + [[] for _ in range(count - len(fitted))] if balanced is None else balanced
    return [sorted(row for unit in part for row in unit.rows) for part in parts]


def fewest(units: Sequence[Unit], budget: int) -> int:
    """Micro-batches that first-fit-decreasing needs, at most 11/9 of the optimum plus one.

    Source: Johnson 1973, "Near-optimal bin packing algorithms".
    """
    return len(_first_fit_decreasing(units, budget))


def split_padded(lengths: Sequence[int], budget: int, *, count: int | None = None) -> list[list[int]]:
    """Cut rows into rectangles: rows of similar length, with rows × longest at most `budget`, for models with padding.

    Args: as for split_units.
    """
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if parts and lengths[parts[-1][0]] * (len(parts[-1]) + 1) <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    if count is not None and count < len(parts):
        raise ValueError(f"{len(lengths)} rows need {len(parts)} micro-batches of {budget} tokens, not {count}")
    if not parts:
        return [[] for _ in range(count or 0)]
    while count is not None and len(parts) < count:  # halve the largest
        largest = max(range(len(parts)), key=lambda number: len(parts[number]))
        half = len(parts[largest]) // 2
        parts[largest : largest + 1] = [parts[largest][:half], parts[largest][half:]]
    return [sorted(part) for part in parts]


def balance_over_ranks(lengths: Sequence[int], ranks: int, *, quadratic: float = 0.0) -> list[list[int]]:
    """Assign rows to ranks with costs as equal as possible: longest first, each to the cheapest rank.

    Returns: row indices of each rank, ascending; every rank has one where there are at least as many rows.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies": at most 4/3 of the optimum.
    """
    units = [Unit((row,), length) for row, length in enumerate(lengths)]
    parts = _longest_to_cheapest(units, sum(lengths), ranks, quadratic)
    return [sorted(unit.rows[0] for unit in part) for part in parts]


def _longest_to_cheapest(units: Sequence[Unit], budget: int, count: int, quadratic: float) -> list[list[Unit]] | None:
    """`count` lists of units, or None if this order leaves a unit without room."""
    parts: list[list[Unit]] = [[] for _ in range(count)]
    tokens = [0] * count
    cheapest = [(0.0, number) for number in range(count)]  # a heap
    for unit in _longest_first(units):
        full = []
        while cheapest and parts[cheapest[0][1]] and tokens[cheapest[0][1]] + unit.tokens > budget:
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        cost, number = cheapest[0]
        parts[number].append(unit)
        tokens[number] += unit.tokens
        heapq.heapreplace(cheapest, (cost + unit.tokens + quadratic * unit.tokens**2, number))
        for entry in full:
            heapq.heappush(cheapest, entry)
    return parts


def _first_fit_decreasing(units: Sequence[Unit], budget: int) -> list[list[Unit]]:
    parts: list[list[Unit]] = []
    room: list[int] = []
    for unit in _longest_first(units):
        number = next((number for number, left in enumerate(room) if left >= unit.tokens), len(parts))
        if number == len(parts):
            parts.append([])
            room.append(budget)
        parts[number].append(unit)
        room[number] -= unit.tokens
    return parts


def _longest_first(units: Iterable[Unit]) -> list[Unit]:
    return sorted(units, key=lambda unit: (-unit.tokens, unit.rows))
