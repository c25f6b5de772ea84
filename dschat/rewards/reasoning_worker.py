"""Worker that runs reasoning-gym's scorers: python -m dschat.rewards.reasoning_worker.

Request: [answer, name of the task, entry as in its data row]; result: [score in [0, 1], name of the error or ""].
"""

from __future__ import annotations

import math

import reasoning_gym  # noqa: F401  imported once, before processes are forked

from dschat.data.sources.reasoning_gym import entry_of, task_of
from dschat.rewards import worker_loop
from dschat.rewards.guarded_scorers import guard_scorers

_NO_ANSWERS = ("", "I do not know.")


def score(answer: str, task: str, entry: str) -> tuple[float, str]:
    """Score of an answer; 0 if it is not above the scores of _NO_ANSWERS."""
    guard_scorers()  # before scoring: some scorers would execute the answer
    value, error = _scored(answer, task, entry)
    return (value, error) if value > max(_scored(text, task, entry)[0] for text in _NO_ANSWERS) else (0.0, error)


def _scored(answer: str, task: str, entry: str) -> tuple[float, str]:
    try:
        value = float(task_of(task).score_answer(answer, entry_of({"reasoning_entry": entry})))
    except MemoryError:
        raise
    except BaseException as error:  # third-party scorers may raise anything, SystemExit too
        return 0.0, type(error).__name__
    return (min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0), ""


def main() -> None:
    worker_loop.serve(lambda request: score(*request), prepare=lambda request: task_of(request[1]))


if __name__ == "__main__":
    main()
