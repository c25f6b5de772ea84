"""Metrics over several answers to one prompt: pass@k and the majority vote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples, drawn from n of which c are correct, is: 1 − C(n−c, k) / C(n, k).

    Computed as a product, since the binomials overflow floats. Its mean over prompts is the unbiased pass@k estimate.

    Raises: ValueError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.

    Source: Chen et al. 2021, eq. 1 (arXiv:2107.03374).
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} samples, {c} correct: needs 0 <= correct <= samples and 1 <= k <= samples.")
    if n - c < k:
        return 1.0  # fewer than k incorrect samples
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority(answers: Sequence[str | None]) -> int | None:
    """Index of the first sample with the most frequent answer (ties: the earliest answer); None without answers.

    Source: Wang et al. 2022, Self-Consistency (arXiv:2203.11171).
    """
    counts = Counter(answer for answer in answers if answer is not None)
    return answers.index(counts.most_common(1)[0][0]) if counts else None
