"""Row assignment: the split over the three phases, the held-out rows, and the mixing weights of several sources.

Every decision about a row is a function of (seed, row index) alone: it does not depend on the other sources in the
list, on the number of rows, or on the world size, and it needs no pass over the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_WEYL = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd


def split_position(row_index: int, *, seed: int) -> float:
    """A number in [0, 1) for this row: the golden-ratio rotation from a starting point drawn from the seed.

    For every N, an interval of length s receives s·N of the first N rows, up to a few: ten rows split "2,4,4" give
    about 2, 4 and 4, while independent random numbers could leave a phase empty. Appending rows to a file does not
    reassign the old ones.

    Source: Weyl 1916 (equidistribution); Knuth, TAOCP 3, §6.4 (multiplicative hashing by the golden ratio).
    """
    start = int.from_bytes(hashlib.blake2b(f"split:{seed}".encode(), digest_size=8).digest(), "big")
    return (((start + row_index * _WEYL) & 0xFFFFFFFFFFFFFFFF) >> 11) / 2**53


def parse_data_split(data_split: str) -> tuple[float, float, float]:
    """The shares of steps 1, 2, 3: "2,4,4" → (0.2, 0.4, 0.4).

    Raises:
        ValueError: not three numbers from 0 to 1e9 with a positive sum.
    """
    try:
        shares = [float(part) for part in data_split.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or not all(0 <= share <= 1e9 for share in shares) or sum(shares) == 0:
        raise ValueError(
            f"--data_split {data_split!r}: give three numbers, the shares of steps 1, 2 and 3, none negative, "
            'none above 1e9 and not all zero, such as "2,4,4".'
        )
    return tuple(share / sum(shares) for share in shares)


def assign(
    row_index: int, *, seed: int, shares: Sequence[float] | None, phase: int, eval_fraction: float
) -> str | None:
    """The split of this row in this phase: "train", "eval", or None if it belongs to another phase.

    Args:
        shares: of the three phases, summing to 1; None gives every row to every phase.
        phase: 1, 2 or 3.
        eval_fraction: share of the phase's rows that is held out.
    """
    position = split_position(row_index, seed=seed)
    if shares is not None:
        edges = [0.0, shares[0], shares[0] + shares[1], 1.0]
        low, high = edges[phase - 1], edges[phase]
        if not low <= position < high:
            return None
        position = (position - low) / (high - low)
    return "eval" if position < eval_fraction else "train"


def mixed_rows(counts: Sequence[int], weights: Sequence[float] | None, *, seed: int) -> list[np.ndarray]:
    """Row numbers of each source in one mixed epoch.

    A weight is the fraction of the mixed epoch's rows that come from the source (weights are divided by their sum).
    The epoch has as many rows as all sources together. So a source is repeated (whole copies, then a random
    subset without replacement) or subsampled. Without weights, every row occurs once.

    Args:
        counts: rows of each source.
        weights: one positive number for each source, or None.

    Returns:
        For each source the sorted row numbers, int64, each in [0, count).

    Raises:
        ValueError: a source with a weight has no rows.
    """
    if weights is None:
        return [np.arange(count, dtype=np.int64) for count in counts]
    if 0 in counts:
        raise ValueError(f"Source {list(counts).index(0) + 1} of --data_path has a weight but no usable rows.")
    total = sum(counts)
    exact = [total * weight / sum(weights) for weight in weights]
    row_counts = [int(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: row_counts[i] - exact[i])
    for i in by_remainder[: total - sum(row_counts)]:
        row_counts[i] += 1
    rows = []
    for n, (count, row_count) in enumerate(zip(counts, row_counts, strict=True)):
        part = np.random.default_rng([seed, n]).permutation(count)[: row_count % count]
        rows.append(np.sort(np.concatenate([np.tile(np.arange(count), row_count // count), part])).astype(np.int64))
    return rows
