"""The model card of an exported folder: README.md with what was trained from what, on which data, and how to load it.

It is made from the files of the run (run.json, metrics.jsonl) and of the exported folder.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from dschat import __version__
from dschat.arguments.secrets import redacted
from dschat.arguments.strict_json import parse_json, read_json_object
from dschat.distributed import collectives
from dschat.distributed.terminal import printable
from dschat.runs.card_examples import loading_example
from dschat.runs.card_settings import changed_settings, portable
from dschat.runs.card_sources import base_metadata, hub_data_sets, hub_name, method_of, trained_from

FILE = "README.md"
MARK = "<!-- Written by dschat. The next export replaces this file, unless this line is removed. -->"
# Metrics of time and hardware, which say nothing about the model.
ABOUT_SPEED = re.compile(
    r"seconds_.*|.*_seconds|.*(tokens|samples)_per_second|(peak_)?memory_gib|mfu|padding|(.*_)?learning_rate|time|step"
)


def write_model_card(folder: str | Path, *, run_folder: str | Path, name: str) -> None:
    """Write README.md into an exported folder; the main rank writes, the others do nothing.

    A README.md without the mark of this suite is kept. A problem is printed as a warning: the model has been exported.

    Args:
        folder: the exported folder.
        run_folder: output folder of the run.
        name: which of the run's models it is: "" (the trained model, in step 3 the actor), "critic", "actor_ema" or
            "best", with "/adapter" appended for its adapters.
    """
    if not collectives.is_main():
        return
    path = Path(folder, FILE)
    try:
        if is_foreign(path):
            print(printable(f"{path} was not written by this suite and is kept; there is no model card"), flush=True)
            return
        text = model_card(Path(folder), run_folder=Path(run_folder), name=name)
        temporary = path.with_name(f".{FILE}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except Exception as error:  # of any kind: it must not fail a run whose model has been written
        reason = printable(f"{type(error).__name__}: {error}")
        print(f"warning: {path}: the model card could not be written ({reason})", file=sys.stderr, flush=True)


def is_foreign(path: Path) -> bool:
    """Whether there is a README.md that this suite did not write, or whose mark the user has removed."""
    if not path.is_file():
        return path.exists() or path.is_symlink()
    return MARK not in path.read_text(encoding="utf-8", errors="replace")


def model_card(folder: Path, *, run_folder: Path, name: str) -> str:
    """The text of README.md. Raises OSError, ValueError or KeyError if the files of the run or model are incomplete."""
    run = read_json_object(run_folder / "run.json", constants=True)
    arguments = run["arguments"]
    is_adapter, classifier = (folder / "adapter_config.json").is_file(), _is_classifier(folder)
    base, method = trained_from(arguments, name), method_of(run["name"], arguments, name)
    example = loading_example(
        folder, is_adapter=is_adapter, classifier=classifier,
        trust_remote_code=arguments.get("trust_remote_code", False),
    )  # fmt: skip
    front = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-classification" if classifier else "text-generation",
        **base_metadata(base, is_adapter=is_adapter),
        "datasets": hub_data_sets(arguments),
        "tags": ["dschat", *method.tags, *(["lora"] if is_adapter else [])],
    }
    front = yaml.safe_dump({key: value for key, value in front.items() if value}, sort_keys=False, allow_unicode=True)
    sections = [
        f"---\n{front}---\n\n{MARK}\n\n# {base if hub_name(base) else Path(base).name}, {method.name}",
        f"{method.product} Trained from {_code(base)} with {method.description} by `training/{run['name']}/main.py` of "
        f"dschat {__version__}." + (" This folder has LoRA adapters only." if is_adapter else ""),
        f"## How to load it\n\n```python\n{example}```",
        f"## Data\n\n{_data(arguments)}",
        f"## Evaluation and training\n\n{_metric_tables(run_folder / 'metrics.jsonl')}",
        "## Settings\n\nFlags that differ from their defaults, as `--config` reads them:\n\n"
        f"```yaml\n{_settings(run['name'], arguments)}```",
        f"## Versions\n\n{_versions(run)}",
    ]
    return redacted("\n\n".join(sections)) + "\n"


def _is_classifier(folder: Path) -> bool:
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        return read_json_object(adapter, constants=True).get("task_type") == "SEQ_CLS"
    architectures = read_json_object(folder / "config.json", constants=True).get("architectures") or []
    return any(name.endswith("ForSequenceClassification") for name in architectures)


def _data(arguments: Mapping[str, Any]) -> str:
    uses = {"training": arguments.get("data_path"), "evaluation": arguments.get("eval_data_path")}
    return "\n".join(f"- {use}: {', '.join(map(_code, entries))}" for use, entries in uses.items() if entries)


def _settings(program: str, arguments: Mapping[str, Any]) -> str:
    return yaml.safe_dump(changed_settings(program, arguments), sort_keys=False, allow_unicode=True, width=110)


def _metric_tables(path: Path) -> str:
    """First and last evaluation, and the last training step, as tables; the steps are in the headings."""
    rows = _rows(path)
    evaluations = [row for row in rows if row.get("phase") == "eval"]
    training = [row for row in rows if row.get("phase") == "train"]
    tables = []
    if evaluations:
        columns = [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else evaluations
        tables.append(_table("on held-out rows", columns))
    if training:
        tables.append(_table("in training", training[-1:]))
    return "\n\n".join(tables) or "No metrics were logged."


def _rows(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; those that a killed run left incomplete are skipped."""
    rows = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        with suppress(ValueError):
            rows.append(parse_json(line, constants=True))
    return [row for row in rows if isinstance(row, dict)]


def _table(heading: str, columns: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in columns[-1] if name != "phase" and not ABOUT_SPEED.fullmatch(name)]
    cells = [[_number(column.get(name)) for column in columns] for name in names]
    steps = [f"step {column['step']}" for column in columns]
    lines = [
        f"| {heading} | {' | '.join(steps)} |",
        f"|---|{'---|' * len(columns)}",
        *(f"| `{name}` | {' | '.join(numbers)} |" for name, numbers in zip(names, cells, strict=True)),
    ]
    return "\n".join(lines)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "–"


def _versions(run: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in run["versions"].items())
    devices = run["devices"]
    return f"{versions}. Processes: {devices['processes']} ({devices['name']}). Started {run['started']}."


def _code(entry: str) -> str:
    return f"`{portable(entry)}`"
