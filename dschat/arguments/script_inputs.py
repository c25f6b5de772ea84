"""Validate arguments of the programs in scripts/: numbers, files, folders. Errors print one message, exit status 2.

The types are for argparse, which adds the flag to their messages. Does not import torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dschat.arguments.bounds import Bounds
from dschat.arguments.strict_json import parse_json, read_json_file
from dschat.arguments.text_rules import path_problem

MISTAKE = 2  # exit status, as in argparse
PORTS = {"at_least": 0, "at_most": 65535}
LARGEST = 1e12  # bound of numbers without a bound of their own
SEEDS = {"at_least": 0, "at_most": 2**63 - 1}


@contextmanager
def exit_on_mistake(program: str) -> Iterator[None]:
    """Exit with status 2 and the message of a ValueError or OSError raised inside.

    Characters that the console cannot encode are printed as escapes.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (ValueError, OSError) as mistake:
        print(f"{program}: {_message(mistake)}", file=sys.stderr, flush=True)
        raise SystemExit(MISTAKE) from mistake


def number_type(
    kind: type, *, at_least: float | None = None, at_most: float | None = None, above: float | None = None
) -> Callable[[str], Any]:
    """An argparse type: a finite number within bounds. kind: int or float."""
    bounds = Bounds(at_least=at_least, above=above, at_most=LARGEST if at_most is None else at_most)

    def parse(text: str) -> Any:
        try:
            value = kind(text if text.isascii() and "_" not in text else "")  # int() accepts 1_000, and other digits
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r:.100} is not {expected}") from None
        if violation := bounds.violation(value):
            raise argparse.ArgumentTypeError(f"{text:.100}: must be {violation}")
        return value

    return parse


def existing_file(text: str) -> Path:
    """An argparse type: an existing file."""
    _check_path(text)
    path = Path(text)
    if not text or not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file" if text and path.is_dir()
                                         else f"there is no file {text!r}")  # fmt: skip
    return path


def existing_folder(text: str) -> Path:
    """An argparse type: an existing folder."""
    _check_path(text)
    path = Path(text)
    if not text or not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder" if text and path.exists()
                                         else f"there is no folder {text!r}")  # fmt: skip
    return path


def new_file(text: str) -> Path:
    """An argparse type: a file to write, whose folder exists or can be created."""
    _check_path(text)
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file" if text else "is empty; name a file")
    _check_writable(path.parent, text)
    return path


def new_folder(text: str) -> Path:
    """An argparse type: a folder to write to, which exists or can be created."""
    _check_path(text)
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a folder")
    _check_writable(Path(text), text)
    return Path(text)


def read_json(path: Path) -> Any:
    """Load a JSON file. Raises ValueError with its path."""
    return read_json_file(path, constants=True)


def read_json_lines(path: Path, *, fields: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Load the objects of a jsonl file. Raises ValueError with file and line, also if one of `fields` is missing."""
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, constants=True)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        missing = [name for name in fields if not isinstance(row, dict) or name not in row]
        if missing or not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: must be a JSON object with {', '.join(fields) or 'fields'}")
        rows.append(row)
    return rows


def unicode_text(text: str) -> str:
    """An argparse type: a text that is valid UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200} is not valid UTF-8") from error
    return text


def _check_path(text: str) -> None:
    if text and (rule := path_problem(text)):
        raise argparse.ArgumentTypeError(f"{text!r:.200} {rule}")


def _check_writable(folder: Path, text: str) -> None:
    """Raise if the folder, or its nearest existing parent, is not writable."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: {folder} is not a writable folder")


def _message(mistake: Exception) -> str:
    if isinstance(mistake, OSError) and mistake.filename is not None and mistake.strerror:
        return f"{mistake.filename}: {mistake.strerror}"
    return str(mistake)
