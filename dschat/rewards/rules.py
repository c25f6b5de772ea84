"""Rule-based rewards chosen by name: pure functions of texts, token counts and the prompt's row.

Each takes some of prompts, responses, rows, token_ids, messages, ended, max_tokens (see ResponseBatch), and options,
which may follow its name as in a query string. None means no score: the row lacks the column.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch

from dschat.data.marked_answers import last_boxed
from dschat.rewards.answer_extraction import exact_number, last_number, plain_text
from dschat.rewards.math.equality import equal_answers
from dschat.rewards.math.verify_process import require_math_verify
from dschat.rlhf.advantages import overlong_penalty

Scores = list[float | None]


def exact(responses: Sequence[str], rows: Sequence[dict], *, column: str = "answer", case: bool = False) -> Scores:
    """1 if the response equals the column's text, ignoring white space (and case, unless case=true); else 0."""
    return _compare_with_column(
        responses, rows, column, lambda response, truth: plain_text(response, case=case) == plain_text(truth, case=case)
    )


def last_number_is(
    responses: Sequence[str], rows: Sequence[dict], *, column: str = "answer", tolerance: float = 0.0
) -> Scores:
    """1 if the last number of the response equals the last one of the column, within the tolerance; else 0.

    1,000 = 1000.0, 3/4 = 0.75. A numeric column is used as the number.

    Raises: ValueError if an existing column contains no number, or the tolerance is negative.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance={tolerance}: must be at least 0")

    def equal(response: str, truth: str) -> bool:
        number, true_number = last_number(response), exact_number(truth)
        true_number = last_number(truth) if true_number is None else true_number
        if true_number is None:
            raise ValueError(f"column {column} contains {truth!r}, which has no number")
        return number is not None and abs(number - true_number) <= Fraction(tolerance)

    return _compare_with_column(responses, rows, column, equal)


def boxed(responses: Sequence[str], rows: Sequence[dict], *, column: str = "answer") -> Scores:
    """1 if the content of the last \\boxed{} equals the column's answer (or the content of its last \\boxed{}); else 0.

    Numbers are compared by value, formulas by mathematical equality (see math.equality). A comparison that times out
    counts as wrong.

    Raises: ImportError without the package math-verify.
    """
    require_math_verify()
    scores: Scores = [None if row.get(column) is None else 0.0 for row in rows]
    pairs: dict[int, tuple[str, str]] = {}
    for number, (response, row) in enumerate(zip(responses, rows, strict=True)):
        answer = last_boxed(response)
        if scores[number] is not None and answer is not None:
            truth = str(row[column])
            boxed_truth = last_boxed(truth)
            pairs[number] = (answer, truth if boxed_truth is None else boxed_truth)
    for number, equal in zip(pairs, equal_answers(list(pairs.values())), strict=True):
        scores[number] = float(equal)
    return scores


def tag_format(responses: Sequence[str], *, tags: str = "think,answer") -> Scores:
    """1 if each tag is opened and closed exactly once, the pairs in this order and not nested; else 0.

    Text may precede, separate and follow the pairs.

    Raises: ValueError for an empty list of tags.
    """
    names = [name.strip() for name in tags.split(",")]
    if not all(re.fullmatch(r"[\w-]+", name) for name in names):
        raise ValueError(f"tags={tags}: must be names separated by commas, such as think,answer")
    expected = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    pattern = re.compile("|".join(map(re.escape, expected)))
    return [float(pattern.findall(response) == expected) for response in responses]


def length(token_ids: Sequence[Sequence[int]], *, target: int = 0, max: int = 0) -> Scores:
    """1 for a response of `target` tokens, or of at most `max`; falls linearly to 0 at 0 and twice as many. EOS counts.

    Raises: ValueError unless exactly one of the two is given, above 0.
    """
    if (target > 0) == (max > 0):
        raise ValueError("give one of target=TOKENS and max=TOKENS, above 0")
    counts = [len(ids) for ids in token_ids]
    relative_excess = [abs(count - target) / target if target else (count - max) / max for count in counts]
    return [0.0 if excess > 1 else 1.0 - excess if excess > 0 else 1.0 for excess in relative_excess]


def repetition(responses: Sequence[str], *, ngram: int = 3) -> Scores:
    """A penalty in (−1, 0]: minus the share of word n-grams that repeat an earlier one of the response.

    −(1 − distinct n-grams / n-grams); 0 for a response with fewer than n words. Case-insensitive.

    Raises: ValueError unless ngram is at least 1.
    """
    if ngram < 1:
        raise ValueError(f"ngram={ngram}: must be at least 1")
    scores: Scores = []
    for response in responses:
        words = response.casefold().split()
        grams = [tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1)]
        scores.append(len(set(grams)) / len(grams) - 1.0 if grams else 0.0)
    return scores


def overlong(token_ids: Sequence[Sequence[int]], max_tokens: int, *, buffer: int = 0, factor: float = 1.0) -> Scores:
    """Soft overlong penalty: 0 up to max_tokens − buffer tokens, from there linearly to −factor at max_tokens.

    Raises: ValueError unless 0 < buffer ≤ max_tokens and factor > 0.

    Source: Yu et al. 2025, DAPO, eq. 13 (arXiv:2503.14476).
    """
    if factor <= 0:
        raise ValueError(f"factor={factor}: must be above 0; it is the largest penalty")
    lengths = torch.tensor([len(ids) for ids in token_ids])
    return overlong_penalty(lengths, max_tokens=max_tokens, buffer=buffer, factor=factor).tolist()


def reasoning_gym(prompts: Sequence[str], responses: Sequence[str], rows: Sequence[dict]) -> Scores:
    """Score by the scorer of the reasoning-gym task that generated the prompt.

    Raises: ImportError without the package reasoning_gym.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ImportError("the package reasoning_gym is not installed: pip install -e '.[reasoning]' installs it")
    from dschat.rewards.reasoning_gym import reasoning_score

    return reasoning_score(prompts, responses, rows)


RULES: dict[str, Callable[..., Scores]] = {
    "exact": exact,
    "last_number": last_number_is,
    "boxed": boxed,
    "format": tag_format,
    "length": length,
    "repetition": repetition,
    "overlong": overlong,
    "reasoning_gym": reasoning_gym,
}


def _compare_with_column(
    responses: Sequence[str], rows: Sequence[dict], column: str, equal: Callable[[str, str], bool]
) -> Scores:
    """1 where a response equals its row's column, 0 where not, None if the row lacks the column."""
    truths: list[Any] = [row.get(column) for row in rows]
    return [
        None if truth is None else float(equal(response, str(truth)))
        for response, truth in zip(responses, truths, strict=True)
    ]
