"""A training contender in a process of its own, which runs one turn at a time and waits in between."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from worker_answers import last_log_line, read_answer

START_SECONDS, TURN_SECONDS = 900, 3600


class TrainingTurn(NamedTuple):
    """Measurement of one turn.

    Attributes:
        lengths: real tokens of every sequence, prompt included, padding excluded.
        peak_bytes: peak memory of all turns so far: resident set without interpreter and imports, or CUDA memory.
    """

    seconds: float
    lengths: list[int]
    peak_bytes: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class TrainingProcess:
    """A worker (see worker_channel.py), ready to run turns.

    Attributes:
        note: what the worker says about itself.
    """

    def __init__(self, python: str, worker: Path, case: Path, *, threads: int, log: Path) -> None:
        """Start it and wait until it is ready.

        Args:
            python: the interpreter.
            worker: its script.
            case: the JSON file that describes the work.
            threads: OMP_NUM_THREADS.
            log: the file for its output.

        Raises:
            RuntimeError: it does not start; the message ends with the error in its log.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {
            "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        self.log = log
        reader, writer = os.pipe()
        self._answers = os.fdopen(reader)
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [python, str(worker), str(case), str(writer)], env=environment, start_new_session=True, text=True,
                stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=(writer,), bufsize=1,
            )  # fmt: skip
        os.close(writer)  # so that reading ends when the worker does
        start = time.perf_counter()
        try:
            self.note = self._answer(START_SECONDS)["note"]
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - start

    def turn(self) -> TrainingTurn:
        """Run one turn. Raises RuntimeError if the worker fails."""
        try:
            self._process.stdin.write("turn\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(f"the worker ended: {last_log_line(self.log)}") from error
        return TrainingTurn(**self._answer(TURN_SECONDS))

    def close(self) -> None:
        """Kill all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._answers.close()

    def _answer(self, seconds: float) -> dict:
        return read_answer(self._answers, seconds, worker="the worker", log=self.log)

