"""Asking functions and services of users that may raise, hang or answer nonsense."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dschat.distributed import watchdog
from dschat.distributed.terminal import printable
from dschat.rewards.functions import Judge, judge_scores

SHORTEST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds, of what a service asks for
LONGEST_BACKOFF = 8.0  # seconds between two tries of ours: a service that is back is noticed soon
REFUSALS_UNTIL_WARNING = 4  # 3.5 s
LONGEST_WAIT = 2.0**21  # seconds (24 days) that sockets and locks can count; more is no limit


class Unavailable(ConnectionError):
    """A service that cannot be reached, or answers later; `seconds`: when it wants to be asked again, if it said so."""

    def __init__(self, message: str, *, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class NoScores(RuntimeError):
    """So many calls in a row gave no score at all that going on makes no sense."""


class RetryPolicy:
    """How long an answer is waited for, and how often it is asked for again.

    Args:
        seconds: for one call; a call that takes longer is left alone (its thread goes on until it ends by itself). Also
            how long a service is asked again that cannot be reached or is busy: at the pace that it asks for, else
            after 0.5 s, then twice as long each time, at most 8 s. inf: no limit.
        retries: further calls after the first, of one that was reached and failed.
        max_failed_calls: raise NoScores when so many calls of `scores` in a row, for one source, gave no score at all;
            None: never.

    Raises: ValueError for seconds that are not above 0, or fewer than 0 retries.
    """

    def __init__(self, *, seconds: float, retries: int, max_failed_calls: int | None = None) -> None:
        if not seconds > 0 or retries < 0:
            raise ValueError(f"{seconds} seconds and {retries} retries: must be above 0, and at least 0")
        self.seconds, self.retries, self.max_failed_calls = seconds, retries, max_failed_calls
        self._failed_calls: Counter[str] = Counter()  # of each source, in a row

    def judge_scores(
        self, judge: Judge, messages: Sequence[list[dict[str, str]]], responses: Sequence[str], rows: Sequence[dict]
    ) -> list[float | None]:
        """The judge's score of each response; None for those that it would not score."""
        return self.scores(
            lambda part: judge_scores(judge, messages[part], responses[part], rows[part]), len(responses),
            who="the judge",
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

        Raises: NoScores, see max_failed_calls.
        """
        try:
            found = self._insisted(lambda: ask(slice(0, count)), who=who)
            self._failed_calls[who] = 0
            return found
        except (TimeoutError, Unavailable, PermissionError) as error:
            found, problem = [None] * count, error
        except Exception as error:  # whatever a user's function raises
            found, problem = self._alone(ask, count, error)
        message = f"warning: {who} gave no score to {found.count(None)} of {count} responses"
        print(printable(f"{message} ({type(problem).__name__}: {problem})"), file=sys.stderr, flush=True)
        failed = count > 0 and found.count(None) == count
        self._failed_calls[who] = self._failed_calls[who] + 1 if failed else 0
        if self.max_failed_calls is not None and self._failed_calls[who] >= self.max_failed_calls:
            raise NoScores(
                f"{who} gave no score to any response in {self._failed_calls[who]} batches one after another "
                f"({type(problem).__name__}: {problem})"
            )
        return found

    def _insisted(self, call: Callable[[], Any], *, who: str) -> list[float]:
        """The result of a call that is made again where it fails. Raises what its last failure was."""
        deadline, failures, refusals = time.monotonic() + self.seconds, 0, 0
        while True:
            try:
                return list(bounded(call, seconds=self.seconds))
            except PermissionError:
                raise
            except Unavailable as error:
                pause = pause_before_retry(error.seconds, refusals, left=deadline - time.monotonic())
                if pause is None:
                    raise
                refusals += error.seconds is None
                if refusals == REFUSALS_UNTIL_WARNING and error.seconds is None:
                    print(f"warning: {who} is not available ({error}); it is asked again for {self.seconds:g} s",
                          file=sys.stderr, flush=True)  # fmt: skip
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


def pause_before_retry(asked_for: float | None, refusals: int, *, left: float) -> float | None:
    """Seconds to wait before a service that was not available is asked again; None: its time is up.

    Args:
        asked_for: what the service wants to be waited for (Retry-After), if it said so.
        refusals: how often it was not available before, without saying for how long.
        left: seconds until its time is up; the last try without a Retry-After is made then.
    """
    if asked_for is not None:
        pause = min(max(asked_for, SHORTEST_PAUSE), LONGEST_PAUSE)
        return pause if pause <= left else None
    backoff = min(SHORTEST_PAUSE * 2 ** min(refusals, 10), LONGEST_BACKOFF)
    return min(backoff, left) if left > 0 else None


def timeout_of(seconds: float) -> float | None:
    """Seconds as sockets, locks and asyncio take them: None where there is no limit, or one beyond what they count."""
    return seconds if seconds < LONGEST_WAIT else None


def bounded(call: Callable[[], Any], *, seconds: float) -> Any:
    """The result of a call, waited for so long. An awaitable is awaited, and cancelled when its time is up.

    A call that leaves by SystemExit, or by anything else that is no Exception, has failed: it must not end the run.

    Raises:
        TimeoutError: it did not end in time; or whatever Exception the call raises.
        RuntimeError: it raised something that is none.
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
    deadline = time.monotonic() + min(seconds, LONGEST_WAIT)
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        thread.join(min(left, 1.0))
        watchdog.progress()  # the wait has an end of its own
    if raised:
        # Signals reach the main thread only, so that this KeyboardInterrupt too is the call's own.
        if not isinstance(raised[0], Exception):
            raise RuntimeError(f"it raised {type(raised[0]).__name__}({raised[0]})") from raised[0]
        raise raised[0]
    if not result:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return result[0]


async def _within(value: Awaitable[Any], seconds: float) -> Any:
    try:
        return await asyncio.wait_for(value, timeout_of(seconds))
    except asyncio.TimeoutError as error:  # another class than TimeoutError before Python 3.11
        raise TimeoutError(str(error) or f"no answer within {seconds:g} s") from error
