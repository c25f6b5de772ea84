"""Read the output folder of a run for the report; missing and invalid files become notes on the page."""

from __future__ import annotations

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
    """

    folder: Path
    info: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict] = field(default_factory=list)
    samples: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.info.get("name") or self.folder.resolve().name)


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


def before_and_after(samples: list[dict], *, limit: int) -> list[tuple[dict, dict | None]]:
    """Pairs (first, last) of samples with the same prompt, evaluation samples preferred.

    If a prompt was sampled at one step only, the second member is None; such pairs come last.
    """
    usable = [s for s in samples if isinstance(s.get("prompt"), str) and isinstance(s.get("response"), str)]
    chosen = [s for s in usable if s.get("phase") == "eval"] or usable
    first: dict[str, dict] = {}
    last: dict[str, dict] = {}
    for sample in chosen:
        first.setdefault(sample["prompt"], sample)
        if sample.get("step") != first[sample["prompt"]].get("step") and (
            sample["prompt"] not in last or sample.get("step") != last[sample["prompt"]].get("step")
        ):
            last[sample["prompt"]] = sample
    pairs = [(sample, last.get(prompt)) for prompt, sample in first.items()]
    return sorted(pairs, key=lambda pair: pair[1] is None)[:limit]
