"""Handle signals outside of the training loop: end this process, and through the watchdog the other ranks."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class EndedBySignal(SystemExit):
    """A signal has ended a run without a checkpoint: outside of the training loop, or if the save failed."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGUSR1 raise EndedBySignal in the main thread, unless a SignalFlag handles them.

    Their default action would end the process without notifying the other ranks, which would hang.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signal handlers are only allowed in the main thread
        return

    def end(number: int, _frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
        print(f"{signal.Signals(number).name}: the run ends without saving a checkpoint", file=sys.stderr, flush=True)
        raise EndedBySignal(number)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
