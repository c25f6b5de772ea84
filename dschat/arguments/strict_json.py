"""Strict parsing of JSON input: every error is a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 256 << 20  # of a JSON file that is read as a whole
MAX_DEPTH = 100  # of nested lists and objects; code that reads the result is recursive
TOO_DEEP = f"not valid JSON (nested deeper than {MAX_DEPTH} levels)"
_MAX_INTEGER_DIGITS = 308  # more are beyond float64


class NumberTooLarge(ValueError):
    """A number beyond float64."""


def parse_json(text: bytes | str, *, constants: bool = False, unique_keys: bool = False) -> Any:
    """Parse a JSON text.

    Args:
        text: bytes are UTF-8, with or without a byte order mark.
        constants: allow NaN, Infinity and numbers beyond float64 such as 1e400.
        unique_keys: refuse an object that has a key twice; the last one wins otherwise.

    Raises:
        ValueError: not JSON, nested deeper than MAX_DEPTH, numbers beyond float64, or not valid Unicode.
            The message is one line, without a file name.
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
    """The decoder of `parse_json`, for text that is read in pieces; pass its results to `check_value`."""
    hooks: dict[str, Any] = {"parse_int": _integer}
    if not constants:
        hooks |= {"parse_constant": _refuse_constant, "parse_float": _finite}
    if unique_keys:
        hooks["object_pairs_hook"] = _object_of_unique_keys
    return json.JSONDecoder(**hooks)


def check_value(value: Any, text: str) -> None:
    """Raise ValueError if a value is nested too deep or contains a string that is not valid Unicode.

    Args:
        text: the JSON text of the value.
    """
    _check_depth(value, text)
    _check_strings(value, text)


def read_json_file(path: str | Path, *, constants: bool = False, unique_keys: bool = False) -> Any:
    """The content of a JSON file; the arguments are those of `parse_json`.

    Raises: ValueError of one line with the file name, also if it cannot be read.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise ValueError("is a folder; name a file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"has more than {MAX_FILE_BYTES >> 20} MiB")
        return parse_json(path.read_bytes(), constants=constants, unique_keys=unique_keys)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_json_object(path: str | Path, *, constants: bool = False, unique_keys: bool = False) -> dict[str, Any]:
    """Load a JSON file that contains an object. Raises: as `read_json_file`, also if it contains another type."""
    value = read_json_file(path, constants=constants, unique_keys=unique_keys)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must be a JSON object, not {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    """Name of the JSON type of a value, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _check_depth(value: Any, text: str) -> None:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH + 1:  # the last level contains scalars only
            raise ValueError(TOO_DEEP)
        inner = [item for item in level if isinstance(item, (dict, list))]
        level = [part for item in inner for part in (item.values() if isinstance(item, dict) else item)]


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - (content.rfind(b"\n", 0, error.start) + 1) + 1
        raise ValueError(f"not valid JSON (invalid UTF-8 at line {line}, byte {column}: save it as UTF-8)") from error


def _check_strings(value: Any, text: str) -> None:
    """Half of a surrogate pair is valid JSON, but tokenizers and Arrow reject it."""
    if "\\u" not in text:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("not valid Unicode (a lone \\ud8xx escape)") from error


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _MAX_INTEGER_DIGITS:
        raise NumberTooLarge(f"an integer of {len(digits.lstrip('-'))} digits is beyond float64")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise NumberTooLarge(f"the number {digits[:40]} is beyond float64")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"not valid JSON ({name} is not a JSON number)")


def _object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return value
