"""Read the output folder of a run for the report; missing and invalid files become notes on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat.arguments.strict_json import parse_json, read_json_object


@dataclass
class Run:
    """The contents of one output folder, as far as they could be read.

    Attributes:
        info: content of run.json.
        metrics, samples: lines of metrics.jsonl and samples.jsonl.
        notes: what is missing or invalid.
        label: the shortest end of the path that no other run on the page has.
    """

    folder: Path
    info: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict] = field(default_factory=list)
    samples: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    label: str = ""

    def __post_init__(self) -> None:
        self.label = self.label or self.folder.resolve().name

    @property
    def name(self) -> str:
        return str(self.info.get("name") or self.folder.resolve().name)

    @property
    def arguments(self) -> dict[str, Any]:
        """Flag → value; empty if run.json has none."""
        arguments = self.info.get("arguments")
        return arguments if isinstance(arguments, dict) else {}


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, each folder once, with labels that differ."""
    different: dict[Path, Path] = {}
    for folder in folders:
        different.setdefault(folder.resolve(), folder)
    runs = [read_run(folder) for folder in different.values()]
    for run, label in zip(runs, distinct_labels(list(different)), strict=True):
        run.label = label
    return runs


def distinct_labels(paths: Sequence[Path]) -> list[str]:
    """A name for each of these different absolute paths: as few last parts as no other path ends with.

    Of more than three parts the inner ones become "…", if the names still differ.
    """
    full = []
    for path in paths:
        others = [other.parts for other in paths if other != path]
        depths = range(1, len(path.parts) + 1)
        depth = next((n for n in depths if all(other[-n:] != path.parts[-n:] for other in others)), len(path.parts))
        full.append(path.parts[-depth:])
    short = [(parts[0], "…", parts[-1]) if len(parts) > 3 else parts for parts in full]
    return ["/".join(s if short.count(s) == 1 else f) for s, f in zip(short, full, strict=True)]


def read_run(folder: Path) -> Run:
    run = Run(folder)
    if not folder.is_dir():
        run.notes.append("no such folder")
        return run
    run.info = read_info(folder / "run.json", run.notes)
    run.metrics = read_jsonl(folder / "metrics.jsonl", run.notes)
    samples = folder / "samples.jsonl"
    if samples.exists() or not run.name.startswith(("step1", "step2")):  # these steps write no samples
        run.samples = read_jsonl(samples, run.notes)
    return run


def number_of(value: Any) -> float | None:
    """The value as a float if it is a finite number (and not a bool), else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for float
        return None


def elapsed_seconds(metrics: Sequence[dict]) -> list[float | None]:
    """Seconds of training at each line; `time` starts at 0 again when a run is resumed."""
    finished, previous, elapsed = 0.0, 0.0, []
    for row in metrics:
        seconds = number_of(row.get("time"))
        if seconds is not None:
            if seconds < previous:
                finished += previous
            previous = seconds
        elapsed.append(None if seconds is None else finished + seconds)
    return elapsed


def read_info(path: Path, notes: list[str]) -> dict[str, Any]:
    """Load the object in a JSON file; {} and a note if that fails."""
    if not path.exists():
        notes.append(f"{path.name} is missing")
        return {}
    try:
        return read_json_object(path, constants=True)
    except ValueError as error:
        notes.append(f"{path.name}: {str(error).removeprefix(f'{path}: ')}")
        return {}


def read_jsonl(path: Path, notes: list[str]) -> list[dict]:
    """The objects of a jsonl file. Invalid lines are skipped and noted; the last may be incomplete."""
    if not path.is_file():
        notes.append(f"{path.name} is {'a folder' if path.is_dir() else 'missing'}")
        return []
    rows: list[dict] = []
    invalid: list[str] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror})")
        return []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row, problem = object_of(line)
        if row is not None:
            rows.append(row)
        else:
            invalid.append(f"line {number}" + (" (the last, truncated)" if number == len(lines) else f": {problem}"))
    if invalid:
        notes.append(f"{path.name}: {len(invalid)} unreadable line(s), first at {invalid[0]}")
    elif not rows:
        notes.append(f"{path.name} is empty")
    return rows


def object_of(line: bytes) -> tuple[dict | None, str]:
    """The JSON object of a line, or None and the error."""
    try:
        row = parse_json(line, constants=True)
    except ValueError as error:
        return None, str(error)
    return (row, "") if isinstance(row, dict) else (None, "not a JSON object")
