"""Asking functions and services of users that may raise, hang or answer nonsense."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dschat import watchdog
from dschat.rlhf.reward_functions import Judge, judged

SHORTEST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds


class Unavailable(ConnectionError):
    """A service that cannot be reached, or answers later; `seconds`: when it wants to be asked again, if it said so."""

    def __init__(self, message: str, *, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class Patience:
    """How long an answer is waited for, and how often it is asked for again.

    Args:
        seconds: for one call; a call that takes longer is left alone (its thread goes on until it ends by itself). Also
            how long a service is asked again and again that says when it wants to be.
        retries: further calls after the first. One that cannot be reached is given a pause before each, of 0.5 s at
            first, then twice as long each time.
    """

    def __init__(self, *, seconds: float, retries: int) -> None:
        self.seconds, self.retries = seconds, retries

    def opinions(
        self, judge: Judge, messages: Sequence[list[dict[str, str]]], responses: Sequence[str], rows: Sequence[dict]
    ) -> list[float | None]:
        """The judge's score of each response; None for those that it would not score."""
        return self.scores(
            lambda part: judged(judge, messages[part], responses[part], rows[part]), len(responses), who="the judge"
        )

    def scores(
        self, ask: Callable[[slice], Sequence[float] | Awaitable[Sequence[float]]], count: int, *, who: str
    ) -> list[float | None]:
        """The score of each response; None for those that it would not score.

        After the retries, one that raised or gave a wrong answer is asked about each response alone, once, so that
        one bad response costs one score. One that hung, refused us or cannot be reached is not: it gave no score.

        Args:
            ask: the scores of some of the responses.
            who: is asked, for the warning.
        """
        try:
            return self._insisted(lambda: ask(slice(0, count)))
        except (TimeoutError, Unavailable, PermissionError) as error:
            found, problem = [None] * count, error
        except Exception as error:  # whatever a user's function raises
            found, problem = self._alone(ask, count, error)
        print(
            f"warning: {who} gave no score to {found.count(None)} of {count} responses ({type(problem).__name__}: "
            f"{problem})", file=sys.stderr, flush=True,
        )  # fmt: skip
        return found

    def _insisted(self, call: Callable[[], Any]) -> list[float]:
        """The result of a call that is made again where it fails. Raises what its last failure was."""
        deadline, failures = time.monotonic() + self.seconds, 0
        while True:
            try:
                return list(bounded(call, seconds=self.seconds))
            except PermissionError:
                raise
            except Unavailable as error:
                failures += error.seconds is None
                pause = SHORTEST_PAUSE * 2 ** (failures - 1)
                if error.seconds is not None:
                    pause = min(max(error.seconds, SHORTEST_PAUSE), LONGEST_PAUSE)
                if failures > self.retries or time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
                watchdog.progress()
            except Exception:  # whatever a user's function raises
                failures += 1
                if failures > self.retries:
                    raise

    def _alone(
        self, ask: Callable[[slice], Any], count: int, problem: Exception
    ) -> tuple[list[float | None], Exception]:
        """The score of each response asked about alone, None where that fails, and the last problem.

        Args:
            problem: of asking about all of them.
        """
        found: list[float | None] = []
        for number in range(count):
            try:
                found += bounded(lambda number=number: ask(slice(number, number + 1)), seconds=self.seconds)
            except Exception as error:
                problem = error
                found.append(None)
                if isinstance(error, (TimeoutError, Unavailable, PermissionError)):
                    break
        return found + [None] * (count - len(found)), problem


def bounded(call: Callable[[], Any], *, seconds: float) -> Any:
    """The result of a call, waited for so long. An awaitable is awaited, and cancelled when its time is up.

    Raises:
        TimeoutError: it did not end in time; or whatever the call raises.
    """
    result: list[Any] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            value = call()
            result.append(asyncio.run(_within(value, seconds)) if inspect.isawaitable(value) else value)
        except BaseException as error:  # handed over to the thread that waits
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)  # a run can end while it hangs
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        thread.join(min(left, 1.0))
        watchdog.progress()  # the wait has an end of its own
    if raised:
        raise raised[0]
    if not result:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return result[0]


async def _within(value: Awaitable[Any], seconds: float) -> Any:
    try:
        return await asyncio.wait_for(value, seconds)
    except asyncio.TimeoutError as error:  # another class than TimeoutError before Python 3.11
        raise TimeoutError(str(error) or f"no answer within {seconds:g} s") from error
