"""Metrics over several responses to one prompt: mean@n, pass@k and the majority vote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dschat.rewards.answer_extraction import extract_answer


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


def answer_metrics(groups: Sequence[Sequence[dict[str, Any]]], *, success: float, extraction: str) -> dict[str, float]:
    """mean@n (share of correct responses), pass@k for k = 2, 4, … n, and maj@n, over groups of n samples per prompt.

    Groups with a sample that has no score are left out; NaN if that leaves none.

    Args:
        success: a response is correct if its score is at least this.
        extraction: how the answer is extracted from a response (see extract_answer), for the majority vote.
    """
    n = len(groups[0])
    groups = [group for group in groups if all(sample["score"] is not None for sample in group)]
    count = len(groups) or math.nan
    correct = [[sample["score"] >= success for sample in group] for group in groups]
    ks = sorted({2**power for power in range(1, n.bit_length()) if 2**power <= n} | {n})
    metrics = {f"mean@{n}": sum(map(sum, correct)) / (n * count)}
    for k in ks:
        metrics[f"pass@{k}"] = sum(pass_at_k(n, sum(group), k) for group in correct) / count
    votes = [majority([extract_answer(sample["response"], extraction) for sample in group]) for group in groups]
    voted_correct = [vote is not None and group[vote] for vote, group in zip(votes, correct, strict=True)]
    metrics[f"maj@{n}"] = sum(voted_correct) / count
    return metrics
