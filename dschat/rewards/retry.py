"""Retries and timeouts for user-defined reward functions and services, which may raise, hang or return bad values."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from dschat.distributed import watchdog
from dschat.distributed.terminal import printable
from dschat.rewards.functions import Judge, judge_scores

SHORTEST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds, bounds of a service's Retry-After
LONGEST_BACKOFF = 8.0  # seconds, without Retry-After: short, to detect a recovered service soon
REFUSALS_UNTIL_WARNING = 4  # after 3.5 s
PACKAGE = str(Path(__file__).resolve().parents[1])  # files of dschat
LONGEST_WAIT = 2.0**21  # seconds (24 days), what sockets and locks support; more means no limit


class Unavailable(ConnectionError):
    """A service that cannot be reached or is busy; `seconds`: its Retry-After, or None."""

    def __init__(self, message: str, *, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class NoScores(RuntimeError):
    """Too many consecutive calls returned no score at all, or the first call of a function failed on every response."""


class RetryPolicy:
    """Timeout and number of retries for calls of reward functions and services.

    Args:
        seconds: timeout of one call; one that takes longer is abandoned (its thread runs until it ends by itself). Also
            how long a service that cannot be reached or is busy is retried: after its Retry-After, else after 0.5 s,
            doubling up to 8 s. inf: no limit.
        retries: further calls after the first, for a source that was reached and failed.
        max_failed_calls: raise NoScores after this many consecutive calls of `scores` without any score, for one
            source; None: never.

    Attributes:
        problems: source → the last error that cost it scores.

    Raises: ValueError if seconds is not above 0, or retries is below 0.
    """

    def __init__(self, *, seconds: float, retries: int, max_failed_calls: int | None = None) -> None:
        if not seconds > 0 or retries < 0:
            raise ValueError(f"{seconds} seconds and {retries} retries: must be above 0, and at least 0")
        self.seconds, self.retries, self.max_failed_calls = seconds, retries, max_failed_calls
        self._failed_calls: Counter[str] = Counter()  # consecutive ones, by source
        self.problems: dict[str, Exception] = {}

    def judge_scores(
        self, judge: Judge, messages: Sequence[list[dict[str, str]]], responses: Sequence[str], rows: Sequence[dict]
    ) -> list[float | None]:
        """The judge's score of each response; None where it returned none."""
        return self.scores(
            lambda part: judge_scores(judge, messages[part], responses[part], rows[part]),
            len(responses),
            source="the judge",
        )

    def scores(
        self, score_part: Callable[[slice], Sequence[float] | Awaitable[Sequence[float]]], count: int, *, source: str
    ) -> list[float | None]:
        """The score of each response; None where the source returned none.

        If all retries raised or returned invalid values, the source is called once for each response separately, so
        that a bad response loses only its own score. After a timeout, a refusal or a failed connection all are None.

        Args:
            score_part: computes the scores of a slice of the responses.
            source: its name, for the warning.

        Raises: NoScores, see max_failed_calls.
        """
        try:
            scores = self._call_with_retries(lambda: score_part(slice(0, count)), source=source)
            self._failed_calls[source] = 0
            return scores
        except (TimeoutError, Unavailable, PermissionError) as error:
            scores, problem = [None] * count, error
        except Exception as error:  # a user's function may raise anything
            scores, problem = self._score_one_by_one(score_part, count, error)
        self.problems[source] = problem
        message = f"warning: {source} returned no score for {scores.count(None)} of {count} responses"
        print(printable(f"{message} ({type(problem).__name__}: {problem})"), file=sys.stderr, flush=True)
        failed = count > 0 and scores.count(None) == count
        self._failed_calls[source] = self._failed_calls[source] + 1 if failed else 0
        if self.max_failed_calls is not None and self._failed_calls[source] >= self.max_failed_calls:
            raise NoScores(
                f"{source} returned no score for any response in {self._failed_calls[source]} consecutive batches "
                f"({type(problem).__name__}: {problem})"
            )
        return scores

    def _call_with_retries(self, call: Callable[[], Any], *, source: str) -> list[float]:
        """Call with retries; raises the last error."""
        deadline, failures, refusals = time.monotonic() + self.seconds, 0, 0
        while True:
            try:
                return list(call_with_timeout(call, seconds=self.seconds))
            except PermissionError:
                raise
            except Unavailable as error:
                pause = pause_before_retry(error.seconds, refusals, remaining=deadline - time.monotonic())
                if pause is None:
                    raise
                refusals += error.seconds is None
                if refusals == REFUSALS_UNTIL_WARNING and error.seconds is None:
                    print(f"warning: {source} is not available ({error}); retrying for {self.seconds:g} s",
                          file=sys.stderr, flush=True)  # fmt: skip
                time.sleep(pause)
                watchdog.progress()
            except Exception:  # a user's function may raise anything
                failures += 1
                if failures > self.retries:
                    raise

    def _score_one_by_one(
        self, score_part: Callable[[slice], Any], count: int, problem: Exception
    ) -> tuple[list[float | None], Exception]:
        """Score each response in a call of its own, None where that fails; also returns the last error.

        Args:
            problem: error of the call for the whole batch.
        """
        scores: list[float | None] = []
        for number in range(count):
            try:
                scores += call_with_timeout(
                    lambda number=number: score_part(slice(number, number + 1)), seconds=self.seconds
                )
            except Exception as error:
                problem = error
                scores.append(None)
                if isinstance(error, (TimeoutError, Unavailable, PermissionError)):
                    break
        return scores + [None] * (count - len(scores)), problem


def is_own_failure(problem: BaseException) -> bool:
    """Whether a source itself is wrong, rather than too slow or cut off from a service, which may come back."""
    return not isinstance(problem, OSError) or isinstance(problem, FileNotFoundError)  # timeouts are OSErrors, too


def own_traceback(problem: BaseException) -> str:
    """The error with the part of its traceback that is not this package's."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(PACKAGE)]
    lines = traceback.format_list(own) + traceback.format_exception_only(problem)
    return "".join(lines).rstrip()


def pause_before_retry(retry_after: float | None, refusals: int, *, remaining: float) -> float | None:
    """Seconds to wait before retrying an unavailable service; None: give up.

    Args:
        retry_after: the service's Retry-After in seconds, or None.
        refusals: earlier failures without a Retry-After.
        remaining: seconds until the deadline; without a Retry-After the last retry is made then.
    """
    if retry_after is not None:
        pause = min(max(retry_after, SHORTEST_PAUSE), LONGEST_PAUSE)
        return pause if pause <= remaining else None
    backoff = min(SHORTEST_PAUSE * 2 ** min(refusals, 10), LONGEST_BACKOFF)
    return min(backoff, remaining) if remaining > 0 else None


def timeout_of(seconds: float) -> float | None:
    """Timeout for sockets, locks and asyncio: None for no limit, or for one above LONGEST_WAIT."""
    return seconds if seconds < LONGEST_WAIT else None


def call_with_timeout(call: Callable[[], Any], *, seconds: float) -> Any:
    """The result of a call, with a timeout. An awaitable is awaited, and cancelled at the timeout.

    SystemExit, or any other BaseException that is not an Exception, counts as a failure and must not end the run.

    Raises:
        TimeoutError: it did not finish in time; or any Exception of the call.
        RuntimeError: it raised a BaseException that is not an Exception.
    """
    result: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            value = call()
            result.append(asyncio.run(_await_with_timeout(value, seconds)) if inspect.isawaitable(value) else value)
        except BaseException as error:  # re-raised in the waiting thread
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)  # daemon: the run can exit while it hangs
    thread.start()
    deadline = time.monotonic() + min(seconds, LONGEST_WAIT)
    while thread.is_alive() and (remaining := deadline - time.monotonic()) > 0:
        thread.join(min(remaining, 1.0))
        watchdog.progress()  # this wait has its own timeout
    if raised:
        # Signals are delivered to the main thread only, so a KeyboardInterrupt here was raised by the call itself.
        if not isinstance(raised[0], Exception):
            raise RuntimeError(f"it raised {type(raised[0]).__name__}({raised[0]})") from raised[0]
        raise raised[0]
    if not result:
        raise TimeoutError(f"no result within {seconds:g} s")
    return result[0]


async def _await_with_timeout(value: Awaitable[Any], seconds: float) -> Any:
    try:
        return await asyncio.wait_for(value, timeout_of(seconds))
    except asyncio.TimeoutError as error:  # another class than TimeoutError before Python 3.11
        raise TimeoutError(str(error) or f"no result within {seconds:g} s") from error
