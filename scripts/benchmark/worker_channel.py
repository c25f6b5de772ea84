"""The worker's end of the pipe to training.py, and its peak memory; imports nothing of dschat, so that it runs in
every environment.

Each line of standard input asks for one turn. Each answer is a JSON object, a line of the pipe whose file descriptor is
the worker's second argument: what libraries print does not get into it. The first argument is the file of the case.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

PR_SET_PDEATHSIG = 1


class Channel:
    """Receives requests for turns, and answers with their measurements.

    Attributes:
        case: the content of the case's file.
    """

    def __init__(self) -> None:
        """Read the case; the memory in use now, by interpreter and imports, is not counted later."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # exit with the parent
        self.case = json.loads(Path(sys.argv[1]).read_text())
        self._answers = os.fdopen(int(sys.argv[2]), "w", buffering=1)
        self._imported_bytes = _status_bytes("VmRSS")
        self._start = 0.0
        self._lengths: list[torch.Tensor] = []

    def ready(self, note: str) -> None:
        """Report that set-up is done. Peak memory counts from here."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
        self._answer(note=note)

    def start_turn(self) -> bool:
        """Wait for a request and start its clock; False: there are no more."""
        if not sys.stdin.readline():
            return False
        self._lengths = []
        _synchronize()
        self._start = time.perf_counter()
        return True

    def count(self, lengths: torch.Tensor | list[int]) -> None:
        """Add sequences that this turn trains on: real tokens of each, prompt and response, without padding."""
        self._lengths.append(torch.as_tensor(lengths))  # not read here: that would wait for the device

    def end_turn(self) -> None:
        """Stop the clock and answer."""
        _synchronize()
        seconds = time.perf_counter() - self._start
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = _status_bytes("VmHWM") - self._imported_bytes
        lengths = [int(length) for part in self._lengths for length in part.tolist()]
        self._answer(seconds=seconds, peak_bytes=peak, lengths=lengths)

    def _answer(self, **values: object) -> None:
        print(json.dumps(values), file=self._answers)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
