"""Answers of a worker process: one JSON object a line."""

from __future__ import annotations

import json
import select
from pathlib import Path
from typing import IO


def read_answer(stream: IO[str], seconds: float, *, worker: str, log: Path) -> dict:
    """The next answer. There is one per request, so no further line can be in the buffer of the text layer.

    Args:
        worker: its name, for messages.
        log: the file with its output.

    Raises:
        RuntimeError: none within `seconds`, or the worker has ended; the message ends with the error in its log.
    """
    if not select.select([stream], [], [], seconds)[0]:
        raise RuntimeError(f"{worker} has not answered for {seconds} s: {last_log_line(log)}")
    line = stream.readline()
    if not line:
        raise RuntimeError(f"{worker} ended: {last_log_line(log)}")
    return json.loads(line)


def last_log_line(log: Path) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "its log is empty")
