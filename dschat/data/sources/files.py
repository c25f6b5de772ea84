"""File readers: stream the rows of one json, jsonl, parquet or csv file.

A row that cannot be parsed is reported with file and line, and reading continues; a file that cannot be read at all
raises ValueError. Only the current row is held in memory (except for a .json file with one big array).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from dschat.arguments.strict_json import TOO_DEEP, NumberTooLarge, check_value, json_decoder, parse_json

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


class RepeatedColumn(ValueError):
    """A table has two columns of one name."""


class SourceRow(NamedTuple):
    fields: dict[str, Any] | None  # None: the row could not be parsed
    where: str  # "file:line" of a text file, "file:row N" (from 0) of a table
    error: str  # "" or why it could not be parsed
    dropped: str = ""  # "" or why a valid row is skipped


def file_rows(file: Path) -> Iterator[SourceRow]:
    """All rows of the file, in order; blank lines are skipped.

    Raises:
        ValueError: the file as a whole cannot be read (a broken array, broken parquet or CSV).
    """
    if file.suffix == ".parquet":
        yield from _parquet_rows(file)
    elif file.suffix == ".csv":
        yield from _csv_rows(file)
    elif file.suffix == ".json" and _first_byte(file) == b"[":
        yield from _json_array_rows(file)
    else:
        yield from _json_lines(file)


def _json_lines(file: Path) -> Iterator[SourceRow]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_row(line.removeprefix(b"\xef\xbb\xbf"), f"{file}:{number}")


def _json_row(line: bytes, where: str) -> SourceRow:
    try:
        return _object_row(parse_json(line.decode("utf-8"), constants=True), where)
    except UnicodeDecodeError as error:
        return SourceRow(None, where, f"not valid UTF-8 (byte {error.start + 1} of the line)")
    except ValueError as error:
        return SourceRow(None, where, str(error))


def _object_row(fields: Any, where: str) -> SourceRow:
    if isinstance(fields, dict):
        return SourceRow(fields, where, "")
    return SourceRow(None, where, f"not a JSON object but {type(fields).__name__}")


def _json_array_rows(file: Path) -> Iterator[SourceRow]:
    """Items of one big array, with the line number of each."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
        decoder, position, line = json_decoder(constants=True), text.index("[") + 1, 1
        counted_until = 0
        while text[(position := _skip_whitespace(text, position))] != "]":
            line, counted_until = line + text.count("\n", counted_until, position), position
            start = position
            item, position = decoder.raw_decode(text, start)
            yield _checked_item(item, text[start:position], f"{file}:{line}")
            position = _skip_whitespace(text, position)
            if text[position] not in ",]":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, position)
            position += text[position] == ","
        if text[position + 1 :].strip():
            raise json.JSONDecodeError("Extra data after it", text, position + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not valid UTF-8 at byte {error.start + 1}; save the file as UTF-8.") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}: not a valid JSON array ({error.msg}); fix it there.") from error
    except RecursionError as error:
        raise ValueError(f"{file}:{line}: {TOO_DEEP}.") from error
    except NumberTooLarge as error:
        raise ValueError(f"{file}:{line}: {error}.") from error
    except IndexError:
        raise ValueError(f"{file}: the JSON array has no end (`]`): the file is probably truncated.") from None


def _checked_item(item: Any, text: str, where: str) -> SourceRow:
    try:
        check_value(item, text)
    except ValueError as error:
        return SourceRow(None, where, str(error))
    return _object_row(item, where)


def _skip_whitespace(text: str, position: int) -> int:
    match = re.compile(r"\s*").match(text, position)
    return match.end() if match else position


def _csv_rows(file: Path) -> Iterator[SourceRow]:
    csv.field_size_limit(2**31 - 1)  # the default limit of 128 KiB is too small for long texts
    # surrogateescape, so that an invalid byte does not stop the rows after it
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)  # otherwise an unclosed quote swallows the following rows
        try:
            names = list(reader.fieldnames or [])
            if any(re.search("[\udc80-\udcff]", name) for name in names):
                raise ValueError(f"{file}:1: the names of the columns are not valid UTF-8; save the file as UTF-8.")
            _refuse_repeated(names, f"{file}:1")
            for row in reader:
                where = f"{file}:{reader.line_num}"
                if None in row:
                    yield SourceRow(None, where, "more fields than the header has")
                elif any(re.search("[\udc80-\udcff]", text) for text in row.values() if text):
                    yield SourceRow(None, where, "not valid UTF-8")
                else:
                    yield SourceRow(row, where, "")
        except csv.Error as error:
            raise ValueError(f"{file}:{reader.line_num}: not valid CSV ({error}).") from error


def _refuse_repeated(columns: Sequence[str], where: str) -> None:
    """Raise if a column name occurs twice: only the last one would be read."""
    if repeated := [name for name in dict.fromkeys(columns) if columns.count(name) > 1]:
        raise RepeatedColumn(f"{where}: the column {repeated[0]!r} occurs twice; rename one of them.")


def _parquet_rows(file: Path) -> Iterator[SourceRow]:
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            _refuse_repeated(table.schema_arrow.names, str(file))
            rows = (row for batch in table.iter_batches(1024) for row in batch.to_pylist())
            for number, row in enumerate(rows):
                yield SourceRow(row, f"{file}:row {number}", "")
    except RepeatedColumn:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # a text may be invalid UTF-8
        raise ValueError(f"{file}: not a readable parquet file ({error}).") from error


def _first_byte(file: Path) -> bytes:
    with file.open("rb") as start:
        return start.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
