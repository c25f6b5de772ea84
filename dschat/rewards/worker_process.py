"""Client of a worker process that scores untrusted answers and is killed when one takes too long (see worker_loop)."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dschat

NO_OUTPUT_TIMEOUT = 120.0  # seconds without output after which the process is killed, if its own limits failed


@dataclass(frozen=True)
class TimeLimits:
    """CPU time that the answers of a batch may take.

    Attributes:
        seconds: limit for each answer.
        budget: seconds that answers beyond their limit may take in total; after that the limit is short_seconds.
        short_seconds: see budget.
    """

    seconds: float
    budget: float
    short_seconds: float


class WorkerProcess:
    """One process that serves requests, started by the first one and then reused; thread-safe and fork-safe.

    It is a new program, not a fork of this process, which has threads and perhaps a device context.

    Args:
        module: run with python -m; it calls worker_loop.serve.
        limits: of each batch of requests.
        package: the third-party package that the module imports.
        install: command that installs the package.
    """

    def __init__(self, module: str, *, limits: TimeLimits, package: str, install: str) -> None:
        self.module, self.limits, self.package, self.install = module, limits, package, install
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._drop_process)
        atexit.register(self.close)

    def results(self, requests: Sequence[Any]) -> list[Any]:
        """The worker's result for each request; None where one exceeded the time or memory limit.

        Args:
            requests: JSON-serialisable values, computed one by one; equal ones are computed once.

        Raises: ImportError if the package is not installed, or cannot be imported.
        """
        limits = self.limits
        with self._lock:
            exceeded_seconds, results = 0.0, {}
            lines = [json.dumps(request) for request in requests]
            for line in lines:
                if line not in results:
                    started = time.monotonic()
                    over_budget = exceeded_seconds >= limits.budget
                    results[line] = self._result(line, limits.short_seconds if over_budget else limits.seconds)
                    exceeded_seconds += time.monotonic() - started if results[line] is None else 0.0
        exceeded = sum(results[line] is None for line in lines)
        if exceeded:
            print(f"warning: {exceeded} of {len(lines)} answers took more than {limits.seconds:g} s or too much memory "
                  f"to be scored with {self.package}: they count as wrong", file=sys.stderr, flush=True)  # fmt: skip
        return [results[line] for line in lines]

    def close(self) -> None:
        """Terminate the process; the next request starts a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=1)
        except subprocess.TimeoutExpired:  # still busy
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
        process.stderr.close()

    def _result(self, request: str, seconds: float) -> Any:
        if self._process is None:
            self._start()
        while select.select([self._process.stdout], [], [], 0)[0] and os.read(self._process.stdout.fileno(), 1 << 12):
            pass  # leftover output, as after an out-of-memory kill
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"[{seconds}, {request}]\n".encode())
            self._process.stdin.flush()
        line = self._read_line(NO_OUTPUT_TIMEOUT)
        if line is None:  # the process has exited, or hangs
            self.close()
            return None
        return json.loads(line)

    def _start(self) -> None:
        root = str(Path(dschat.__file__).resolve().parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if self._read_line(NO_OUTPUT_TIMEOUT) != b"ready":
            self._process.kill()
            reason = self._process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
            self.close()
            raise ImportError(f"{self.package} cannot be used ({reason}): {self.install} installs it")

    def _read_line(self, seconds: float) -> bytes | None:
        """The next output line of the process; None if it has exited or the timeout passed."""
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._process.stdout], [], [], remaining)[0]:
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 12)
            if not data:
                return None
            line += data
        return line.strip()

    def _drop_process(self) -> None:
        """After a fork: the child drops the process, which belongs to the parent."""
        self._lock, self._process = threading.Lock(), None
