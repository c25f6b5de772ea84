"""Signals that make a run save a checkpoint and exit; ranks agree on them at the next step boundary."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SAVED = 75  # exit status (EX_TEMPFAIL): saved after a signal, restart with --resume auto
ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class SavedAndLeft(SystemExit):
    """A signal was received, and the checkpoint is saved: the run exits."""

    def __init__(self) -> None:
        super().__init__(SAVED)


class SignalFlag:
    """The signal that this rank has received, if any.

    Attributes:
        number: number of the last signal; 0: none.
        answer: message printed on a signal: what the run does about it.
    """

    def __init__(self) -> None:
        self.number = 0
        self.answer = "the run is saved at the next step and ends then"
        self._before: dict[int, Callable | int | None] = {}

    def note(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self.number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C exits at once; an unfinished save is removed by the next start
        if not self.number:
            name = signal.Signals(number).name
            again = "; once more leaves at once" if number == signal.SIGINT else ""
            print(f"{name}: {self.answer}{again}", file=sys.stderr, flush=True)
        self.number = number

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Install handlers that only record SIGTERM, SIGUSR1 and SIGINT; a second SIGINT raises KeyboardInterrupt.

        Without an exception they stay installed after the block, since the export follows.
        """
        for number in ASKED:
            self._before.setdefault(number, signal.signal(number, self.note))
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


@contextmanager
def capture_signals() -> Iterator[SignalFlag]:
    """A SignalFlag whose handlers, if installed inside, are removed at the end."""
    received = SignalFlag()
    try:
        yield received
    finally:
        received.restore()
