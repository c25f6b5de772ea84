"""Scores responses to reasoning-gym tasks with the tasks' own scorers, in a process that can be killed."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dschat.data.marked_answers import last_tagged
from dschat.rewards.worker_process import TimeLimits, WorkerProcess

scorers = WorkerProcess(
    "dschat.rewards.reasoning_worker", limits=TimeLimits(seconds=5.0, budget=30.0, short_seconds=0.3),
    package="reasoning-gym", install="pip install -e '.[reasoning]'",
)  # fmt: skip


def reasoning_score(
    prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float | None]:
    """Correctness of each response, in [0, 1]; None where the row is not a reasoning-gym task.

    The answer is the text between the last <answer> and </answer>, else the whole response. It scores 0 if a text
    without an answer would score as much (some tasks give any text a small score), if the task's scorer raises
    (with one warning per task and kind of error), if the scorer exceeds its limit of time or memory, or if the score
    is not finite.

    Args:
        prompts: unused; part of the signature of a judge.
        rows: as made by `ReasoningTask.rows`, directly or from the prepared data.
    """
    scores: list[float | None] = [None if row.get("reasoning_task") is None else 0.0 for row in rows]
    requests: dict[int, tuple[str, str, str]] = {}
    for number, (response, row) in enumerate(zip(responses, rows, strict=True)):
        answer = answer_of(response)
        if scores[number] is None:
            continue
        if answer == row["answer"]:
            scores[number] = 1.0
        else:
            requests[number] = (answer, row["reasoning_task"], row["reasoning_entry"])
    errors: Counter[tuple[str, str]] = Counter()
    for (number, (_, task, _)), result in zip(requests.items(), scorers.results(list(requests.values())), strict=True):
        scores[number], error = result or (0.0, "")
        if error:
            errors[task, error] += 1
    for (task, error), count in errors.items():
        warnings.warn(f"the scorer of {task} raised {error} for {count} responses: scored 0", stacklevel=2)
    return scores


def answer_of(response: str) -> str:
    tagged = last_tagged(response)
    return (response if tagged is None else tagged).strip()
