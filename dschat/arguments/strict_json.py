"""JSON that a user gives, parsed strictly: every error is a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LARGEST_FILE = 256 << 20  # bytes of a JSON file that is read as a whole
DEEPEST = 100  # lists and objects within each other; readers of the result are recursive
TOO_DEEP = f"not valid JSON (nested deeper than {DEEPEST} levels)"
_LONGEST_INTEGER = 308  # digits; more are beyond float64


class NumberTooLarge(ValueError):
    """A number beyond float64."""


def parse_json(text: bytes | str, *, constants: bool = False, unique_keys: bool = False) -> Any:
    """The value that a JSON text holds.

    Args:
        text: bytes are UTF-8, with or without a byte order mark.
        constants: NaN, Infinity and numbers beyond float64 such as 1e400 may occur.
        unique_keys: refuse an object that has a key twice; the last one wins otherwise.

    Raises:
        ValueError: not JSON, nested deeper than DEEPEST, numbers beyond float64, or a string that is no Unicode text.
            The message is one line, and does not name a file.
    """
    if isinstance(text, bytes):
        text = _decoded(text)
    if not text.strip():
        raise ValueError("not valid JSON (it is empty)")
    try:
        value = json_decoder(constants=constants, unique_keys=unique_keys).decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    check_value(value, text)
    return value


def json_decoder(*, constants: bool = False, unique_keys: bool = False) -> json.JSONDecoder:
    """The decoder of `parse_json`, for text that is read piece by piece: what it gives still needs `check_value`."""
    hooks: dict[str, Any] = {"parse_int": _integer}
    if not constants:
        hooks |= {"parse_constant": _refuse_constant, "parse_float": _finite}
    if unique_keys:
        hooks["object_pairs_hook"] = _object_of_unique_keys
    return json.JSONDecoder(**hooks)


def check_value(value: Any, text: str) -> None:
    """Raise ValueError if a value is nested too deep or holds no Unicode text.

    Args:
        text: what it was decoded from.
    """
    _check_depth(value, text)
    _check_strings(value, text)


def read_json_file(path: str | Path, *, constants: bool = False, unique_keys: bool = False) -> Any:
    """The content of a JSON file; the arguments are those of `parse_json`.

    Raises: ValueError of one line that names the file, also where it cannot be read.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise ValueError("is a folder; name a file")
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError(f"has more than {LARGEST_FILE >> 20} MiB")
        return parse_json(path.read_bytes(), constants=constants, unique_keys=unique_keys)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_json_object(path: str | Path, *, constants: bool = False, unique_keys: bool = False) -> dict[str, Any]:
    """The object that a JSON file holds. Raises: as `read_json_file`, also where it holds something else."""
    value = read_json_file(path, constants=constants, unique_keys=unique_keys)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: wants a JSON object, not {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    """JSON name of the type of a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _check_depth(value: Any, text: str) -> None:
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST + 1:  # the last level holds no lists or objects
            raise ValueError(TOO_DEEP)
        inner = [item for item in level if isinstance(item, (dict, list))]
        level = [part for item in inner for part in (item.values() if isinstance(item, dict) else item)]


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - (content.rfind(b"\n", 0, error.start) + 1) + 1
        raise ValueError(f"not valid JSON (no UTF-8 at line {line}, byte {column} of it: save it as UTF-8)") from error


def _check_strings(value: Any, text: str) -> None:
    """Half of a surrogate pair is valid JSON but no text: neither tokenizer nor Arrow takes it."""
    if "\\u" not in text:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("not valid Unicode (a lone \\ud8xx escape)") from error


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _LONGEST_INTEGER:
        raise NumberTooLarge(f"an integer of {len(digits.lstrip('-'))} digits is beyond float64")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise NumberTooLarge(f"the number {digits[:40]} is beyond float64")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"not valid JSON ({name} is no JSON number)")


def _object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return value
