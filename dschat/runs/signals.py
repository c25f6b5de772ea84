"""Signals that make a run save a checkpoint and exit; ranks agree on them at the next step boundary."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SAVED = 75  # exit status (EX_TEMPFAIL): saved after a signal, restart with --resume auto
HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class ExitAfterSave(SystemExit):
    """A signal was received, and the checkpoint is saved: the run exits."""

    def __init__(self) -> None:
        super().__init__(SAVED)


class SignalFlag:
    """The signal that this rank has received, if any.

    Attributes:
        number: number of the last signal; 0: none.
        reaction: what the run does on a signal, for the message.
    """

    def __init__(self) -> None:
        self.number = 0
        self.reaction = "a checkpoint is saved at the next step, then the run ends"
        self._previous_handlers: dict[int, Callable | int | None] = {}

    def _record(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self.number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C exits at once; an unfinished save is removed by the next start
        if not self.number:
            name = signal.Signals(number).name
            again = "; a second Ctrl-C exits at once" if number == signal.SIGINT else ""
            print(f"{name}: {self.reaction}{again}", file=sys.stderr, flush=True)
        self.number = number

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install handlers that record SIGTERM, SIGUSR1 and SIGINT; a second SIGINT raises KeyboardInterrupt.

        If the block ends without an exception they stay installed, for the export that follows.
        """
        for number in HANDLED:
            self._previous_handlers.setdefault(number, signal.signal(number, self._record))
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}


@contextmanager
def capture_signals() -> Iterator[SignalFlag]:
    """Yields a SignalFlag; its handlers, if installed inside, are removed at the end."""
    signal_flag = SignalFlag()
    try:
        yield signal_flag
    finally:
        signal_flag.restore()
