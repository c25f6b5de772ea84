"""Interleaved measurement of contenders on a case, in alternating order; a failure is recorded as a result."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from contender import Contender, Setting, Turn, one_line
from measure import PeakMemory, free_memory
from shapes import Case


@dataclass
class Result:
    """Result of one contender on one case.

    Attributes:
        seconds: of its turns, except the first (warm-up).
        first_seconds: set-up and first turn.
        peak_bytes: peak memory in that time.
        failure: error message, if it failed.
    """

    contender: str
    seconds: list[float] = field(default_factory=list)
    first_seconds: float = 0.0
    peak_bytes: int = 0
    note: str = ""
    failure: str = ""

    @contextlib.contextmanager
    def or_failure(self) -> Iterator[None]:
        """Record an exception as the contender's failure."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or one_line(error)

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds and not self.failure else None

    @property
    def warmup_seconds(self) -> float | None:
        """Extra time of set-up and first turn over a median turn."""
        return None if self.median is None else max(0.0, self.first_seconds - self.median)


def measure_case(setting: Setting, case: Case, contenders: dict[str, Contender], *, repeat: int) -> list[Result]:
    """Set up every contender, then run them in turns; a failure is recorded and the others continue."""
    results = {name: Result(name) for name in contenders}
    try:
        with contextlib.ExitStack() as stack:
            turns = {}
            for name, contender in contenders.items():
                progress(f"{name}: setting up")
                with results[name].or_failure():
                    turns[name] = set_up(setting, case, contender, results[name], stack)
            for repetition in range(repeat):
                # Alternating order, so that drift of the machine's speed affects all contenders equally.
                for name in list(turns)[:: -1 if repetition % 2 else 1]:
                    progress(f"{name}: turn {repetition + 1} of {repeat}")
                    with results[name].or_failure():
                        results[name].seconds.append(seconds_of(turns[name](), case))
    except Exception as error:  # all measurements are done; a failed clean-up must not lose them
        progress(f"a contender failed to shut down: {one_line(error)}")
    free_memory(setting.device)
    return list(results.values())


def set_up(
    setting: Setting, case: Case, contender: Contender, result: Result, stack: contextlib.ExitStack
) -> Callable[[], Turn]:
    """Start a contender, which the stack closes, and run its first turn."""
    with PeakMemory(setting.device) as memory:
        start = time.perf_counter()
        ready = stack.enter_context(contender(setting, case))
        seconds_of(ready.turn(), case)
        result.first_seconds = time.perf_counter() - start
    result.peak_bytes = ready.peak_bytes() if ready.peak_bytes else memory.peak_bytes
    result.note = ready.note
    return ready.turn


def seconds_of(turn: Turn, case: Case) -> float:
    """The seconds of a turn. Raises RuntimeError if it generated a wrong number of tokens."""
    if turn.tokens != case.tokens:
        raise RuntimeError(f"generated {turn.tokens} tokens instead of {case.tokens}")
    return turn.seconds


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
