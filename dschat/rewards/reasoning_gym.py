"""Scores responses to reasoning-gym tasks with the tasks' own scorers."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dschat.data.marked_answers import last_tagged
from dschat.data.sources.reasoning_gym import entry_of, task_of
from dschat.rewards.guarded_scorers import guard_scorers

_NO_ANSWERS = ("", "I do not know.")


def reasoning_score(
    prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float | None]:
    """Correctness of each response, in [0, 1]; None where the row is not a reasoning-gym task.

    The answer is the text between the last <answer> and </answer>, else the whole response. It scores 0 if a text
    without an answer would score as much (some tasks give any text a small score), if the task's scorer raises
    (with one warning per task and kind of error), or if the score is not finite.

    Args:
        prompts: unused; part of the signature of a judge.
        rows: as made by `ReasoningTask.rows`, directly or from the prepared data.
    """
    raised: Counter[tuple[str, str]] = Counter()
    scores = [_score(answer_of(text), row, raised) for text, row in zip(responses, rows, strict=True)]
    for (task, error), count in raised.items():
        warnings.warn(f"the scorer of {task} raised {error} for {count} responses: scored 0", stacklevel=2)
    return scores


def answer_of(response: str) -> str:
    tagged = last_tagged(response)
    return (response if tagged is None else tagged).strip()


def _score(answer: str, row: Mapping[str, Any], raised: Counter[tuple[str, str]]) -> float | None:
    if row.get("reasoning_task") is None:
        return None
    if answer == row["answer"]:
        return 1.0
    task, entry = task_of(row["reasoning_task"]), entry_of(row)
    guard_scorers()  # before scoring: some scorers would execute the answer
    scores = []
    for text in (answer, *_NO_ANSWERS):
        try:
            score = float(task.score_answer(text, entry))
        except Exception as error:  # third-party scorers may raise anything
            if text is answer:
                raised[row["reasoning_task"], type(error).__name__] += 1
            score = 0.0
        scores.append(min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0)
    return scores[0] if scores[0] > max(scores[1:]) else 0.0
