"""Signals that ask a run to save and leave; all ranks agree on them at the next step boundary."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SAVED = 75  # exit status: a signal came, the run is saved, start it again with --resume auto (EX_TEMPFAIL)
ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class SavedAndLeft(SystemExit):
    """The run stands in a checkpoint and ends here, as a signal has asked it to."""

    def __init__(self) -> None:
        super().__init__(SAVED)


class SignalFlag:
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
def capture_signals() -> Iterator[SignalFlag]:
    """A SignalFlag that may begin to listen inside, and does no more afterwards."""
    received = SignalFlag()
    try:
        yield received
    finally:
        received.restore()
