"""Logging of a run: console with progress and ETA, metrics.jsonl, samples.jsonl, run.json, TensorBoard.

Only the main rank writes; on other ranks every method is a no-op. A failed write (a full disk, say) drops the entry and
warns once per record; it does not end the run.
"""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch.utils.tensorboard import SummaryWriter

from dschat.arguments.secrets import redacted, redacted_values
from dschat.distributed import collectives, failpoint
from dschat.distributed.terminal import printable

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "peft", "accelerate")


class RunLog:
    """The logger of a run.

    Args:
        output_dir: output folder of the run.
        name: the step's name, for the console and run.json.
        arguments: flag → value, written to run.json with passwords and keys redacted.
        total_steps: for the ETA.
        tensorboard: folder for event files, or None.
        finished_steps: number of finished steps of a resumed run; entries of later steps are removed from the files.
            None: a new run, all entries are removed.
    """

    def __init__(self, output_dir: str, *, name: str, arguments: Mapping[str, Any], total_steps: int,
                 tensorboard: str | None = None, finished_steps: int | None = None):  # fmt: skip
        self.name, self.total_steps, self.first_step = name, total_steps, finished_steps or 0
        self.started = time.monotonic()
        self.writes = collectives.is_main()
        self.writer, self.metadata = None, {}
        self._failed: set[str] = set()
        if not self.writes:
            return
        self.folder = Path(output_dir)
        until = -1 if finished_steps is None else finished_steps
        for file in ("metrics.jsonl", "samples.jsonl"):
            self._attempt(file, lambda file=file: _keep_until(self.folder / file, until))
        if tensorboard is not None:
            purge = None if finished_steps is None else finished_steps + 1
            self._attempt("TensorBoard", lambda: setattr(self, "writer", SummaryWriter(tensorboard, purge_step=purge)))
        self.metadata = {
            "name": name,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "arguments": redacted_values(arguments),
            "versions": {"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
            "devices": {"accelerator": get_accelerator().device_name(), "processes": collectives.world_size(),
                        "name": get_accelerator().current_device_name()},
        }  # fmt: skip
        content = json.dumps(self.metadata, indent=1).encode()
        self._attempt("run.json", lambda: _replace(self.folder / "run.json", content))

    def metrics(self, step: int, values: Mapping[str, float], *, phase: str = "train") -> None:
        """Log metrics: a line of metrics.jsonl, a TensorBoard scalar for each, and a console line."""
        if not self.writes:
            return
        seconds = time.monotonic() - self.started
        line = {"step": step, "time": round(seconds, 3), "phase": phase}
        # JSON has no NaN or infinity: they are written as null.
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._attempt("metrics.jsonl", lambda: _append(self.folder / "metrics.jsonl", json.dumps(line) + "\n"))
        if self.writer is not None:
            self._attempt("TensorBoard", lambda: self._add_scalars(step, values, phase))
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.info(f"{phase} {step}/{self.total_steps}  {numbers}{self._remaining(step, seconds)}")

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]], *, phase: str = "train") -> None:
        """Append rollouts to samples.jsonl: mappings with at least prompt, response and score."""
        if self.writes:
            lines = (json.dumps({"step": step, "phase": phase, **row}, ensure_ascii=False) + "\n" for row in rows)
            self._attempt("samples.jsonl", lambda: _append(self.folder / "samples.jsonl", "".join(lines)))

    def info(self, text: str) -> None:
        if self.writes:
            self._attempt("console", lambda: print(printable(redacted(f"[{self.name}] {text}")), flush=True))

    def close(self) -> None:
        if self.writer is not None:
            self._attempt("TensorBoard", self.writer.close)

    def _attempt(self, record: str, write: Callable[[], object]) -> None:
        """Write to a record; on OSError drop the entry, and warn once per record."""
        try:
            failpoint.reached(f"log_{record}")
            write()
        except OSError as error:
            if record == "TensorBoard":
                self.writer = None  # its writer thread has ended, later writes would fail too
            if record not in self._failed:
                self._failed.add(record)
                with suppress(OSError):
                    print(f"warning: {record} cannot be written ({error}): the run continues, and its "
                          "entries are dropped until it can be written again", file=sys.stderr, flush=True)  # fmt: skip

    def _add_scalars(self, step: int, values: Mapping[str, float], phase: str) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{phase}/{name}", value, step)

    def _remaining(self, step: int, seconds: float) -> str:
        done = step - self.first_step
        if not done > 0 or step >= self.total_steps:
            return ""
        return f"  ETA {timedelta(seconds=round(seconds / done * (self.total_steps - step)))}"


def _append(path: Path, text: str) -> None:
    """Append text; if only part of it can be written, truncate the file again and raise OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        size, remaining = os.lseek(descriptor, 0, os.SEEK_END), memoryview(text.encode())
        try:
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _replace(path: Path, content: bytes) -> None:
    """Replace the content of a file atomically. Raises OSError, and then leaves it unchanged."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines of a jsonl file after this step, so that a resumed run has no duplicates."""
    if not path.exists():
        return
    kept_lines = []
    content = path.read_bytes()
    for line in content.split(b"\n"):  # bytes: str.splitlines would also split inside strings
        try:
            if json.loads(line)["step"] <= step:
                kept_lines.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            continue  # a truncated line of a killed run
    new = b"".join(kept_lines)
    if content.startswith(new):
        os.truncate(path, len(new))  # also works on a full disk
    else:
        _replace(path, new)
