"""Client of vLLM in another environment: started once per model, runs one rollout at a time, stopped in between."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from worker_answers import last_log_line, read_answer

WORKER = Path(__file__).with_name("vllm_worker.py")
START_SECONDS, TURN_SECONDS = 1200, 900


class VLLMProcess:
    """A process group that is stopped (SIGSTOP) while idle, so that none of its threads can spin.

    Attributes:
        version: of vLLM.
        start_seconds: from the start of the interpreter until vLLM was ready.
        device_bytes: CUDA memory it allocated, if the caller measured it.
    """

    def __init__(self, python: str, *, threads: int, log: Path, **settings: object) -> None:
        """Start it and wait until it is ready.

        Args:
            python: the interpreter of the environment with vLLM.
            threads: OMP_NUM_THREADS, relevant on CPU.
            log: the file for its output.
            settings: arguments of vllm.LLM.

        Raises:
            RuntimeError: it does not start; the message ends with the last line of its log.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        # One process instead of three: on two cores rollouts took 25% less time.
        environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        environment |= {
            "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        self.log, self.device_bytes = log, 0
        start = time.perf_counter()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, str(WORKER), json.dumps(settings)], env=environment, start_new_session=True, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=1,
            )  # fmt: skip
        try:
            self.version = self._answer(START_SECONDS)["version"]
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - start
        self._signal(signal.SIGSTOP)

    def set_requests(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Set the rollout that turn() runs."""
        self._ask({"prompts": prompts, "limits": limits})

    def turn(self) -> tuple[float, int]:
        """Run the rollout; returns the seconds measured in that process and the tokens generated."""
        answer = self._ask({"go": True})
        return answer["seconds"], answer["tokens"]

    def peak_bytes(self) -> int:
        """Sum of its processes' peak resident sets; on CUDA the device memory it allocated."""
        total = 0
        if self.device_bytes:
            return self.device_bytes
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                # Fields after the name (which may contain anything): state, parent, process group.
                group = int((folder / "stat").read_text().rpartition(")")[2].split()[2])
                lines = (folder / "status").read_text().splitlines() if group == self._process.pid else []
            except (OSError, IndexError):
                continue  # it has exited meanwhile
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        return total

    def close(self) -> None:
        """Terminate all its processes."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _ask(self, request: dict[str, object]) -> dict:
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return self._answer(TURN_SECONDS)
        except BrokenPipeError as error:
            raise RuntimeError(f"vLLM ended: {last_log_line(self.log)}") from error
        finally:
            self._signal(signal.SIGSTOP)

    def _answer(self, seconds: float) -> dict:
        return read_answer(self._process.stdout, seconds, worker="vLLM", log=self.log)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
