"""Signals outside of the training loop: the process ends, and the other ranks with it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Ended(SystemExit):
    """A signal has ended a run that was not ready to be saved."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Inside, but outside of `capture_signals`, SIGTERM and SIGUSR1 raise Ended in the main thread.

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
