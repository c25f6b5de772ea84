"""Client of the math-verify subprocess (see verify_worker), which can be killed when a comparison is too slow."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
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

import dschat

SECONDS, SHORT_SECONDS = 2.0, 0.3  # CPU time limit per comparison; 10 to 50 ms are usual
BUDGET = 20.0  # seconds that timeouts of one batch may total; after that the limit is SHORT_SECONDS
LAST_RESORT = 120.0  # seconds without output after which the process is killed, if its own limits failed


def require_math_verify() -> None:
    """Raise ImportError if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("the package math-verify is not installed: pip install -r requirements.txt installs it")


@dataclass(frozen=True)
class Comparison:
    """Two formulas, and the number of decimals for comparing irrational numbers with decimals."""

    given: str
    wanted: str
    decimals: int = 6


class MathVerifyProcess:
    """One process, started at the first comparison and then reused; thread-safe and fork-safe.

    It is a new program, not a fork of this process, which has threads and perhaps a device context.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def compare(self, comparisons: Sequence[Comparison]) -> list[bool | None]:
        """Whether math-verify considers each pair equal; None where it exceeded the time or memory limit.

        Raises:
            ImportError: math-verify is not installed, or cannot be imported.
        """
        with self._lock:
            spent, results, known = 0.0, [], {}
            for comparison in comparisons:
                if comparison not in known:
                    started = time.monotonic()
                    known[comparison] = self._compare(comparison, SECONDS if spent < BUDGET else SHORT_SECONDS)
                    spent += time.monotonic() - started if known[comparison] is None else 0.0
                results.append(known[comparison])
        if exceeded := sum(same is None for same in results):
            print(f"warning: {exceeded} of {len(results)} answers took more than {SECONDS:g} s or too much memory to "
                  "compare with the true ones: they count as wrong", file=sys.stderr, flush=True)  # fmt: skip
        return results

    def close(self) -> None:
        """Terminate the process; the next comparison starts a new one."""
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

    def _compare(self, comparison: Comparison, seconds: float) -> bool | None:
        if self._process is None:
            self._start()
        while select.select([self._process.stdout], [], [], 0)[0] and os.read(self._process.stdout.fileno(), 1 << 12):
            pass  # leftover output, as after an out-of-memory kill
        request = json.dumps([comparison.given, comparison.wanted, comparison.decimals, seconds])
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        answer = self._read(LAST_RESORT)
        if answer not in (b"1", b"0", b"-"):  # the process has exited, or hangs
            self.close()
        return {b"1": True, b"0": False}.get(answer)

    def _start(self) -> None:
        require_math_verify()
        root = str(Path(dschat.__file__).resolve().parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dschat.rewards.math.verify_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if self._read(LAST_RESORT) != b"ready":
            self._process.kill()
            reason = self._process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
            self.close()
            raise ImportError(f"math-verify cannot be used ({reason}): pip install -r requirements.txt installs it")

    def _read(self, seconds: float) -> bytes | None:
        """The next output line of the process; None if it has exited or the timeout passed."""
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            part = os.read(self._process.stdout.fileno(), 1 << 12)
            if not part:
                return None
            line += part
        return line.strip()

    def _forget(self) -> None:
        """After a fork: the child drops the process, which belongs to the parent."""
        self._lock, self._process = threading.Lock(), None
