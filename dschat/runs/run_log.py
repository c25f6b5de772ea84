"""Logging of a run: console, metrics.jsonl, samples.jsonl, run.json, experiment trackers.

Only the main rank writes; on other ranks every method is a no-op. A failed write (a full disk, say) drops the entry and
warns once per record; it does not end the run.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dschat.distributed import collectives, failpoint
from dschat.runs.console import Console
from dschat.runs.run_description import description, earlier_description, ended
from dschat.runs.trackers import Tracker


class RunLog:
    """The logger of a run.

    Args:
        output_dir: output folder of the run.
        name: the step's name, for the console and run.json.
        arguments: flag → value, written to run.json with passwords and keys redacted.
        total_steps: for the ETA.
        logging_steps: interval of console lines where there is no terminal.
        report_to: names of trackers, see dschat.runs.trackers.
        tensorboard: folder for event files. Default: OUTPUT_DIR/tensorboard.
        run_name: for trackers. Default: the name of the output folder.
        finished_steps: number of finished steps of a resumed run; entries of later steps are removed from the files.
            None: a new run, all entries are removed.
    """

    def __init__(self, output_dir: str, *, name: str, arguments: Mapping[str, Any], total_steps: int,
                 logging_steps: int = 1, report_to: Sequence[str] = (), tensorboard: str | None = None,
                 run_name: str | None = None, finished_steps: int | None = None):  # fmt: skip
        self.name, self.started = name, time.monotonic()
        self.writes = collectives.is_main()
        self.trackers: list[Tracker] = []
        self.metadata: dict[str, Any] = {}  # of run.json, what identifies the run: for checkpoints
        self._failed: set[str] = set()
        if not self.writes:
            return
        self.folder = Path(output_dir)
        self.console = Console(
            name, total_steps=total_steps, first_step=finished_steps or 0, logging_steps=logging_steps
        )
        resumed = finished_steps is not None
        for file in ("metrics.jsonl", "samples.jsonl"):
            until = finished_steps if resumed else -1
            self._attempt(file, lambda file=file, until=until: _keep_until(self.folder / file, until))
        earlier = earlier_description(self.folder / "run.json") if resumed else None
        self.run = description(name, arguments, earlier=earlier, first_step=finished_steps or 0)
        self.metadata = {key: self.run[key] for key in ("name", "started", "arguments", "versions", "devices")}
        self._write_run()
        started_with = {
            "run_name": run_name or self.folder.resolve().name, "arguments": self.run["arguments"],
            "purge_step": finished_steps + 1 if resumed else None,
        }  # fmt: skip
        for tracker in report_to:
            folder = Path(tensorboard or self.folder / "tensorboard") if tracker == "tensorboard" else self.folder
            start = partial(Tracker, tracker, folder=folder, **started_with)
            self._attempt(tracker, lambda start=start: self.trackers.append(start()), errors=Exception)

    def metrics(self, step: int, values: Mapping[str, float], *, phase: str = "train") -> None:
        """Log metrics: a line of metrics.jsonl, a scalar for each in the trackers, and the console."""
        if not self.writes:
            return
        seconds = time.monotonic() - self.started
        line = {"step": step, "time": round(seconds, 3), "phase": phase}
        # JSON has no NaN or infinity: they are written as null.
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._attempt("metrics.jsonl", lambda: _append(self.folder / "metrics.jsonl", json.dumps(line) + "\n"))
        self._track(lambda tracker: tracker.metrics(step, values, phase=phase))
        self._attempt("console", lambda: self.console.metrics(step, values, phase=phase, seconds=seconds))

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]], *, phase: str = "train") -> None:
        """Append rollouts to samples.jsonl: mappings with at least prompt, response and score."""
        if not self.writes:
            return
        rows = list(rows)
        lines = (json.dumps({"step": step, "phase": phase, **row}, ensure_ascii=False) + "\n" for row in rows)
        self._attempt("samples.jsonl", lambda: _append(self.folder / "samples.jsonl", "".join(lines)))
        self._track(lambda tracker: tracker.samples(step, rows, phase=phase))

    def info(self, text: str) -> None:
        if self.writes:
            self._attempt("console", lambda: self.console.print(text))

    def close(self, outcome: str = "finished") -> None:
        """Close the trackers, and write the run's duration and outcome to run.json."""
        if not self.writes:
            return
        self._attempt("console", self.console.close)
        self._track(Tracker.close)
        self.run = ended(self.run, outcome=outcome, seconds=time.monotonic() - self.started)
        self._write_run()

    def _write_run(self) -> None:
        content = json.dumps(self.run, indent=1).encode()
        self._attempt("run.json", lambda: _replace(self.folder / "run.json", content))

    def _track(self, log: Callable[[Tracker], None]) -> None:
        """Call every tracker; one that fails is warned about and dropped, as its thread or connection has ended."""
        for tracker in tuple(self.trackers):
            if not self._attempt(tracker.name, lambda tracker=tracker: log(tracker), errors=Exception):
                self.trackers.remove(tracker)

    def _attempt(
        self, record: str, write: Callable[[], object], *, errors: type[Exception] = OSError
    ) -> bool:
        """Write to a record; on an error drop the entry, and warn once per record. Returns whether it was written."""
        try:
            failpoint.reached(f"log_{record}")
            write()
        except errors as error:
            if record not in self._failed:
                self._failed.add(record)
                until = "" if errors is Exception else " until it can be written again"  # trackers are not tried again
                with suppress(OSError):
                    print(f"warning: {record} cannot be written ({error}): the run continues, and its "
                          f"entries are dropped{until}", file=sys.stderr, flush=True)  # fmt: skip
            return False
        return True


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
