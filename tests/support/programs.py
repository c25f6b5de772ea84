"""Runs multi-process programs for tests from a fork server, to avoid importing torch and DeepSpeed in every process.

`python tests/support/programs.py` imports what the steps import and waits. For every JSON line on its standard input
it forks one process per rank, which runs a script as `__main__` in the environment that torchrun would set (a single
rank gets none, as with plain `python`). `Programs` is the client for tests; conftest.py provides it as a fixture.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from repository import TRAINING

MAINS = {
    "sft": TRAINING / "step1_supervised_finetuning" / "main.py",
    "reward": TRAINING / "step2_reward_model_finetuning" / "main.py",
    "dpo": TRAINING / "step2_dpo_finetuning" / "main.py",
    "ppo": TRAINING / "step3_rlhf_finetuning" / "main.py",
}
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HANG_TIMEOUT = 300  # seconds


class Programs:
    """Client of the fork server; runs one program at a time. Use it as a context manager."""

    def __enter__(self) -> Programs:
        # A test that joined a process group here has set rank and port in the environment.
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
        self.server = subprocess.Popen(
            [sys.executable, "-u", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env=environment,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stdin.close()
        self.server.wait()

    def run(self, script: Path, argv: list[Any], *, processes: int = 1, log: Path, code: int | None = 0,
            kill_when: Callable[[], bool] | None = None, environment: dict[str, str] | None = None) -> str:  # fmt: skip
        """Run a script on this many processes to its end; returns its output, which is also written to `log`.

        Args:
            code: the exit status that every process must have; None: every process must fail somehow.
            environment: additional environment variables of every process.
            kill_when: polled; when it returns True, every process gets SIGKILL and must die from it.
        """
        request = {"script": str(script), "argv": [str(word) for word in argv], "processes": processes, "log": str(log),
                 "environment": environment or {}}  # fmt: skip
        self.server.stdin.write(json.dumps(request) + "\n")
        pids = json.loads(self.server.stdout.readline())
        if kill_when is not None:
            code = -signal.SIGKILL
            deadline = time.monotonic() + HANG_TIMEOUT
            while not kill_when() and all(map(_is_running, pids)) and time.monotonic() < deadline:
                time.sleep(0.01)
            for pid in pids:
                if _is_running(pid):
                    os.kill(pid, signal.SIGKILL)
        codes = json.loads(self.server.stdout.readline())
        text = log.read_text(encoding="utf-8")
        as_expected = all(codes) if code is None else codes == [code] * processes
        assert as_expected, f"{script} {' '.join(request['argv'])}: exit status {codes}\n{text[-6000:]}"
        return text


def _is_running(pid: int) -> bool:
    """True while the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the protocol
    # Imported once for all programs, before any thread or process group exists: such a process can be forked.
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    from transformers import (  # noqa: F401  these make transformers load its lazy modules
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        HfArgumentParser,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
    )

    import dschat.preference.reference_logprobs
    import dschat.rlhf.ppo_trainer
    import dschat.rlhf.rlhf_engine  # noqa: F401

    gc.freeze()  # as launch.run does; collections in the children do not touch, and so copy, these objects

    for line in sys.stdin:
        request = json.loads(line)
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(request["processes"])}
        world["LOCAL_WORLD_SIZE"] = world["WORLD_SIZE"]
        pids = []
        for rank in range(request["processes"]):
            pid = os.fork()
            if pid == 0:
                ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                _run_rank(request, world | ranks if request["processes"] > 1 else {})
            pids.append(pid)
        print(json.dumps(pids), file=replies, flush=True)
        print(json.dumps(_wait_for_exit_codes(pids)), file=replies, flush=True)


def _run_rank(request: dict[str, Any], environment: dict[str, str]) -> None:
    """Become one process of the program; does not return."""
    code = 0
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment | request["environment"])
    sys.argv = [request["script"], *request["argv"]]
    sys.path[0] = str(Path(request["script"]).parent)
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as exited:
        code = exited.code if isinstance(exited.code, int) else int(exited.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait_for_exit_codes(pids: list[int]) -> list[int]:
    """Exit statuses; like launchers, terminates the others soon after one fails, and all of them on a timeout."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + HANG_TIMEOUT
    while len(codes) < len(pids):
        for pid in pids:
            ended, status = (0, 0) if pid in codes else os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    deadline = min(deadline, time.monotonic() + 10)
            elif pid not in codes and time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    _serve()
