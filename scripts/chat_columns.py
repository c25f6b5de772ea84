"""Answers side by side in a terminal, written as they are generated."""

from __future__ import annotations

import os
import signal
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from types import FrameType
from typing import TextIO

from streamed_text import Answer

from dschat.distributed.terminal import printable

MIN_COLUMNS = 100  # a narrower terminal gets one answer below the other
SEPARATOR = " | "


def cells(text: str) -> int:
    """Columns that a terminal gives to a text: 2 for wide characters, 0 for combining ones."""
    return sum(_cells_of(character) for character in text)


def _cells_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def wrapped(text: str, width: int) -> Iterator[tuple[int, str]]:
    """(index of its first character in the text, row): rows of at most `width` cells, at least one.

    Rows break at spaces where possible. Text that is appended changes no row but the last.
    """
    start, row, used = 0, "", 0
    for index, character in enumerate(text):
        if character == "\n":
            yield start, row
            start, row, used = index + 1, "", 0
            continue
        if used + _cells_of(character) > width:
            cut = row.rfind(" ") + 1
            if character == " " or not row[:cut].strip():
                cut = len(row)  # the row ends with a word, or is one word
            yield start, row[:cut].rstrip()
            start, row = start + cut, row[cut:]
            used = cells(row)
            if character == " " and not row:
                start += 1
                continue
        row += character
        used += _cells_of(character)
    yield start, row


def clipped(text: str, width: int) -> str:
    """One row of a heading: of a longer text its end, which names the folder."""
    return text if cells(text) <= width else "…" + text[len(text) - width + 1 :]


class LiveColumns:
    """Texts in columns that grow at the bottom of a terminal.

    Only rows on the screen can be written again. A row below which every column has another row is final, and the
    others are rewritten in place: no more of them than the screen has, see `lead`.

    Args:
        size: of the terminal, in character cells.
    """

    def __init__(self, count: int, *, size: os.terminal_size, out: TextIO) -> None:
        # The last cell of a row stays empty, because terminals differ in what follows it.
        self.width = (size.columns - 1 - len(SEPARATOR) * (count - 1)) // count
        self.height = max(size.lines - 2, 2)
        self.out = out
        self._rows: list[list[str]] = [[""] for _ in range(count)]
        self._last_rows = [0] * count  # where the last row of each text begins
        self._final = 0  # rows of the texts that will not change
        self._drawn: list[str] = []  # the rows below these, as they are on the screen

    def set_text(self, column: int, text: str) -> None:
        """Replace a text by one that it is the beginning of."""
        begin = self._last_rows[column]
        rest = printable(text.strip()).replace("\t", "    ")[begin:]
        starts, rows = zip(*wrapped(rest, self.width), strict=True)
        self._rows[column][-1:] = rows
        self._last_rows[column] = begin + starts[-1]

    def lead(self, column: int, columns: Sequence[int]) -> int:
        """How many rows this column is ahead of the shortest of these."""
        return len(self._rows[column]) - min(len(self._rows[other]) for other in columns)

    def draw(self, growing: Sequence[int]) -> None:
        """Write the rows that have changed. growing: the columns that are not complete."""
        live = [rows[self._final :] for rows in self._rows]
        rows = [self.joined(parts) for parts in zip_longest(*live, fillvalue="")]
        rows += [""] * (len(self._drawn) - len(rows))
        pairs = enumerate(zip_longest(rows, self._drawn))
        changed = next((number for number, (new, old) in pairs if new != old), None)
        if changed is not None:
            changed = max(changed, len(self._drawn) - self.height)
            up = len(self._drawn) - changed
            self.out.write(f"\x1b[{up}A" if up else "")
            self.out.write("".join(f"\r{row}\x1b[K\n" for row in rows[changed:]))
            self.out.flush()
        complete = min((len(self._rows[column]) - 1 for column in growing), default=self._final + len(rows))
        final = max(complete - self._final, 0)
        self._final, self._drawn = self._final + final, rows[final:]

    def joined(self, parts: Sequence[str]) -> str:
        padded = [part + " " * (self.width - cells(part)) for part in parts[:-1]]
        return SEPARATOR.join([*padded, parts[-1]])


def stream_columns(
    answers: Sequence[Answer | None], *, headings: Sequence[str], size: os.terminal_size, out: TextIO
) -> None:
    """Generate the answers in turns, token by token, each in its column; Ctrl-C stops all of them.

    An answer that is nearly a screen ahead waits for the others. None: no answer, its column is empty.
    """
    columns = LiveColumns(len(answers), size=size, out=out)
    titles = [printable(clipped(heading, columns.width)) for heading in headings]
    rule = "-+-".join("-" * columns.width for _ in titles)
    out.write(f"{columns.joined(titles)}\n{rule}\n")
    pieces = {column: iter(answer) for column, answer in enumerate(answers) if answer is not None}
    with interrupts_as_flag() as interrupted:
        while pieces and not interrupted.is_set():
            for column in list(pieces):
                if columns.lead(column, list(pieces)) >= columns.height // 2:
                    continue
                if next(pieces[column], None) is None:
                    del pieces[column]
                else:
                    columns.set_text(column, answers[column].text)
            columns.draw(list(pieces))
        if interrupted.is_set():
            out.write("\r\x1b[K")  # the terminal's echo, ^C
            for column in pieces:
                columns.set_text(column, answers[column].text.rstrip() + " [interrupted]")
        columns.draw([])


@contextmanager
def interrupts_as_flag() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of raising: rows that are half written could not be found again.

    A second Ctrl-C raises KeyboardInterrupt, as without this. Main thread only.
    """
    interrupted = threading.Event()

    def note_interrupt(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            signal.default_int_handler(number, frame)
        interrupted.set()

    before = signal.signal(signal.SIGINT, note_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
