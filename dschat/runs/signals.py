"""Signals that ask a run to save and leave; all ranks agree on them at the next step boundary."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SAVED = 75  # exit status: a signal came, the run is saved, start it again with --resume auto (EX_TEMPFAIL)
ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class SavedAndLeft(SystemExit):
    """The run stands in a checkpoint and ends here, as a signal has asked it to."""

    def __init__(self) -> None:
        super().__init__(SAVED)


class Ended(SystemExit):
    """A signal has ended a run that was not ready to be saved."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


@contextmanager
def ending_the_run() -> Iterator[None]:
    """Inside, but outside of `noted`, SIGTERM and SIGUSR1 raise Ended in the main thread.

    Left to themselves they end the process without a word, and the other ranks would wait for it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows handlers in the main thread only
        return

    def end(number: int, _frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)  # the second one ends it at once
        print(f"{signal.Signals(number).name}: the run ends here, not saved", file=sys.stderr, flush=True)
        raise Ended(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Received:
    """The signal that this rank has received, if any.

    Attributes:
        number: of the newest signal; 0: none.
        answer: what is said to a signal of what comes of it.
    """

    def __init__(self) -> None:
        self.number = 0
        self.answer = "the run is saved at the next step and ends then"
        self._before: dict[int, Callable | int | None] = {}

    def note(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self.number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C leaves at once; a save in progress leaves only its own mess
        if not self.number:
            name = signal.Signals(number).name
            again = "; once more leaves at once" if number == signal.SIGINT else ""
            print(f"{name}: {self.answer}{again}", file=sys.stderr, flush=True)
        self.number = number

    @contextmanager
    def listening(self) -> Iterator[None]:
        """From here on SIGTERM, SIGUSR1 and SIGINT are noted and change nothing else, but for a second SIGINT.

        Behind the block too, where it ends well: what has been trained in it is still to be exported.
        """
        for number in ASKED:
            self._before.setdefault(number, signal.signal(number, self.note))
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """From here on signals do what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


@contextmanager
def noted() -> Iterator[Received]:
    """A Received that may begin to listen inside, and does no more afterwards."""
    received = Received()
    try:
        yield received
    finally:
        received.restore()
