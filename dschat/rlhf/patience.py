"""Asking functions of users that may raise, hang or answer nonsense."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dschat.rlhf.rewards import Judge, judged


class Patience:
    """How long an answer is waited for, and how often it is asked for again.

    Args:
        seconds: for one call; a call that takes longer is left alone (its thread goes on until it ends by itself).
        retries: further calls after the first.
    """

    def __init__(self, *, seconds: float, retries: int) -> None:
        self.seconds, self.retries = seconds, retries

    def opinions(
        self, judge: Judge, messages: Sequence[list[dict[str, str]]], responses: Sequence[str], rows: Sequence[dict]
    ) -> list[float | None]:
        """The judge's score of each response; None for those that it would not score.

        After the retries, a judge that raised or gave a wrong answer is asked about each response alone, once, so that
        one bad response costs one score. A judge that hung is not asked again: its scores are all None.
        """
        problem: Exception | None = None
        for _ in range(1 + self.retries):
            try:
                return list(bounded(lambda: judged(judge, messages, responses, rows), seconds=self.seconds))
            except Exception as error:  # whatever a user's function raises
                problem = error
        found: list[float | None] = []
        for number in range(len(responses)):
            one = slice(number, number + 1)
            try:
                if isinstance(problem, TimeoutError):
                    raise problem
                alone = bounded(lambda one=one: judged(judge, messages[one], responses[one], rows[one]),
                                seconds=self.seconds)  # fmt: skip
                found.append(alone[0])
            except Exception as error:
                problem = error
                found.append(None)
        missing = sum(score is None for score in found)
        print(
            f"warning: the judge gave no score to {missing} of {len(responses)} responses ({type(problem).__name__}: "
            f"{problem})", file=sys.stderr, flush=True,
        )  # fmt: skip
        return found


def bounded(call: Callable[[], Any], *, seconds: float) -> Any:
    """The result of a call, waited for so long.

    Raises:
        TimeoutError: it did not end in time; or whatever the call raises.
    """
    result: list[Any] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            result.append(call())
        except BaseException as error:  # handed over to the thread that waits
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)  # a run can end while it hangs
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not result:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return result[0]
