"""reasoning-gym as a data source: generated tasks with programmatically verifiable answers.

    reasoning_gym:TASK?FIELD=VALUE&FIELD=VALUE      such as reasoning_gym:chain_sum?size=2000&seed=1&max_terms=3

Every field of the task's configuration can be set; seed defaults to 0. Row i is generated from seed + i, so two
sources share rows unless their seeds differ by more than their sizes.

Source: Stojanovski et al. 2025, Reasoning Gym (arXiv:2505.24760).
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import enum
import importlib.metadata
import json
import os
import subprocess
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from dschat.arguments.strict_json import parse_json

from .files import SourceRow

PREFIX = "reasoning_gym:"


@dataclasses.dataclass(frozen=True)
class ReasoningTask:
    """A task with its configuration; `name` is the entry of --data_path, from which the task can be recreated."""

    name: str

    def rows(self) -> Iterator[SourceRow]:
        """Rows: prompt, response (the expected answer; not every task has one), answer, reasoning_task (this name),
        reasoning_entry (the input of the task's scorer, see `entry_of`).

        They are generated in a subprocess with a fixed hash seed: some tasks iterate over sets of strings, whose order
        would otherwise differ between processes, and so between nodes.
        """
        command = [sys.executable, "-m", "dschat.data.sources.reasoning_gym", self.name]
        environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment) as child:
            try:
                for number, line in enumerate(child.stdout):
                    row = json.loads(line)
                    yield SourceRow(row.get("fields"), f"{self.name}:row {number}", row.get("error", ""))
            except GeneratorExit:  # the consumer stopped early
                child.kill()
                raise
        if child.returncode != 0:
            raise ValueError(f"{self.name}: the generator ended with exit status {child.returncode}; see its output")

    def identity(self) -> list[str]:
        """Changes when the rows may have changed."""
        return [importlib.metadata.version("reasoning-gym"), self.name, repr(task_of(self.name).config)]


def reasoning_task(path: str) -> ReasoningTask:
    """Raises ValueError: the package is missing, unknown task or field, or a value of the wrong type."""
    task_of(path)
    return ReasoningTask(path)


@lru_cache(maxsize=64)
def task_of(path: str) -> Any:
    """The reasoning_gym dataset of an entry of --data_path; raises like `reasoning_task`."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(
            f"--data_path {path}: needs the package reasoning-gym; in the suite's folder: pip install -e '.[reasoning]'"
        ) from error
    task, _, query = path.removeprefix(PREFIX).partition("?")
    if task not in DATASETS:
        raise ValueError(f"--data_path {path}: reasoning-gym has no task {task!r}{_nearest(task, DATASETS)}")
    config = {"seed": 0, **_parse_config(path, query, typing.get_type_hints(DATASETS[task][1]))}
    try:
        return create_dataset(task, **config)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"--data_path {path}: the task rejects this configuration ({error}).") from error


def row_of(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of the task as a JSON-serialisable row."""
    answer = entry["answer"]
    expected = {} if answer is None else {"response": str(answer)}
    metadata = {"reasoning_task": name, "reasoning_entry": _to_json(entry)}
    answer = None if answer is None else str(answer)
    return {"prompt": entry["question"], **expected, "answer": answer, **metadata}


def entry_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `row_of`; restores tuples and numeric keys, whose types the scorers compare."""
    return _from_json(row["reasoning_entry"])


def _parse_config(path: str, query: str, hints: Mapping[str, Any]) -> dict[str, Any]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ValueError(f"--data_path {path}: write FIELD=VALUE&FIELD=VALUE after the question mark.") from error
    values = {}
    for name, text in pairs:
        if name not in hints:
            raise ValueError(f"--data_path {path}: the task has no field {name!r}{_nearest(name, hints)}")
        try:
            values[name] = _value(text, hints[name])
        except (ValueError, TypeError) as error:
            kind = getattr(hints[name], "__name__", hints[name])
            raise ValueError(f"--data_path {path}: {name}={text} is not a valid {kind} ({error}).") from error
    return values


def _value(text: Any, hint: Any) -> Any:
    """Convert text (or an item of a JSON list) to the type of the hint."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        plain = [kind for kind in arguments if kind is not type(None)]
        return None if len(plain) < len(arguments) and text in ("none", "None", None) else _value(text, plain[0])
    if origin is typing.Literal:
        if text not in arguments:
            raise ValueError(f"choose one of {', '.join(arguments)}")
        return text
    if (origin or hint) in (list, tuple, Sequence):
        items = parse_json(text) if isinstance(text, str) else text
        if not isinstance(items, list):
            raise ValueError("write a JSON list, such as [1, 2]")
        of = [kind for kind in arguments if kind is not Ellipsis]
        values = [_value(x, of[min(i, len(of) - 1)]) if of else x for i, x in enumerate(items)]
        return tuple(values) if (origin or hint) is tuple else values
    if hint is bool:
        if str(text).lower() not in ("true", "false"):
            raise ValueError("write true or false")
        return str(text).lower() == "true"
    if hint in (datetime.date, datetime.time):
        return hint.fromisoformat(text)
    if hint in (int, float, str) or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return hint(text)
    raise ValueError("it cannot be given as text")


def _nearest(word: str, names: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, names, n=3)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    first, more = sorted(names)[:20], len(names) - 20
    return f"; the choices are {', '.join(first)}{f' and {more} more' if more > 0 else ''}."


def _to_json(value: Any) -> Any:
    """A value as JSON; {"tuple": [...]} and {"items": [[key, value], ...]} encode tuples and other dicts."""
    if isinstance(value, Mapping):
        return {"items": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_to_json(item) for item in value]}
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    return value.item() if type(value).__module__ == "numpy" else value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if isinstance(value, dict):
        ((kind, items),) = value.items()
        originals = [_from_json(item) for item in items]
        return tuple(originals) if kind == "tuple" else dict(originals)
    return value


def _print_rows(name: str) -> None:
    """Entry point of the subprocess: prints one JSON line per row; a failing entry gives a line with the error."""
    task = task_of(name)
    for index in range(len(task)):
        try:
            line = json.dumps({"fields": row_of(name, task[index])})
        except Exception as error:  # third-party generators may raise anything
            line = json.dumps({"error": f"the task raises {type(error).__name__}: {error}"})
        print(line)


if __name__ == "__main__":
    _print_rows(sys.argv[1])
