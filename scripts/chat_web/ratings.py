"""Ratings of two answers → a file of preference pairs, as step 2 reads them."""

from __future__ import annotations

import datetime
import json
import os
import threading
from pathlib import Path
from typing import Any

from dschat.arguments.strict_json import parse_json
from dschat.data.records import parse_record

CHOICES = ("first", "second", "tie")


class RatingsFile:
    """A jsonl file that ratings are appended to.

    Step 2 has no rows without a preference, so ties go to a file beside it, with the name NAME.ties.jsonl.

    Raises: ValueError if the file exists and its first line is no preference pair.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.ties = path, path.with_name(f"{path.stem}.ties.jsonl")
        self._lock = threading.Lock()
        if path.exists():
            _check_first_line(path)

    def append(self, row: dict[str, Any], *, tie: bool) -> Path:
        """Write one row to the disk; returns its file. Raises OSError with the file's name."""
        path = self.ties if tie else self.path
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                if size:
                    file.seek(size - 1)
                    line = b"\n" * (file.read(1) != b"\n") + line  # after a line that was cut off
                try:
                    while line:
                        line = line[file.write(line) :]
                    os.fsync(file.fileno())
                except OSError as error:
                    file.truncate(size)
                    raise OSError(error.errno, error.strerror, str(path)) from error
        return path


def preference_row(
    prompt: list[dict[str, str]], answers: list[dict[str, Any]], choice: str, *, sampling: dict[str, Any]
) -> dict[str, Any]:
    """The row of a rating: a preference pair, or for a tie both answers in the order of the page.

    Args:
        prompt: messages before the answers.
        answers: two of {"content": str, "ended": whether a stop token ended it, "model": name}.
        choice: one of CHOICES.
        sampling: settings of both answers, kept for reference.

    Raises: ValueError if step 2 could not use the pair.
    """
    if any(not answer["content"].strip() for answer in answers):
        raise ValueError("an answer is empty: step 2 cannot learn from such a pair, so it is not saved")
    when = {"rated": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "sampling": sampling}
    if choice == "tie":
        return {"prompt": prompt, "answers": answers, **when}
    if answers[0]["content"].strip() == answers[1]["content"].strip():
        raise ValueError("both answers are the same text, so neither is better: nothing is saved")
    better, worse = answers if choice == "first" else reversed(answers)
    row: dict[str, Any] = {"prompt": prompt}
    for name, answer in (("chosen", better), ("rejected", worse)):
        # A list, because a text with "Human:" and "Assistant:" would be split into turns.
        row[name] = [{"role": "assistant", "content": answer["content"]}]
    for name, answer in (("chosen", better), ("rejected", worse)):
        row |= {f"{name}_ended": answer["ended"], f"{name}_model": answer["model"]}
    parse_record(row, "preference")
    return row | when


def _check_first_line(path: Path) -> None:
    with path.open("rb") as file:
        line = file.readline()
    try:
        if line.strip():
            parse_record(parse_json(line), "preference")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--ratings {path}: exists, but its first line is no preference pair ({error}): name another file"
        ) from error
