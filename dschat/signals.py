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


class Received:
    """The signal that this rank has received, if any."""

    def __init__(self) -> None:
        self.number = 0

    def note(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self.number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C leaves at once; a save in progress leaves only its own mess
        if not self.number:
            name = signal.Signals(number).name
            again = "; once more leaves at once" if number == signal.SIGINT else ""
            print(f"{name}: the run is saved at the next step and ends then{again}", file=sys.stderr, flush=True)
        self.number = number


@contextmanager
def noted() -> Iterator[Received]:
    """Inside, SIGTERM, SIGUSR1 and SIGINT are noted and change nothing else, but for a second SIGINT."""
    received = Received()
    before: dict[int, Callable | int | None] = {number: signal.signal(number, received.note) for number in ASKED}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
