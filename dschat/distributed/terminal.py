"""Text for a terminal: control characters escaped, lines no wider than it."""

from __future__ import annotations

import shutil
import sys
import textwrap

# Control characters except newline and tab (C0, DEL, C1: escape sequences, bells, carriage returns), Unicode line
# separators, bidirectional overrides, and surrogates, which cannot be encoded.
_RANGES = [
    (0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F), (0x2028, 0x2029), (0x202A, 0x202E), (0x2066, 0x2069), (0xD800, 0xDFFF),
]  # fmt: skip
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for first, last in _RANGES
    for code in range(first, last + 1)
}


def printable(text: object) -> str:
    r"""Replace control characters by escapes, such as "\x1b" and "\u202e".

    Newlines, tabs and letters of every script are kept. Works per character, so chunks of a stream can be passed.
    """
    return str(text).translate(_ESCAPES)


def quoted(value: object) -> str:
    """The repr of a value for a message: one line of readable length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def fitted(text: str, *, indent: str = "    ") -> str:
    """Lines wrapped between words to the width of the terminal, if standard output is one; paths are not cut."""
    if not is_terminal():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def fitted_command(command: str, *, indent: str) -> str:
    """An indented shell command, on a terminal continued on further lines where it is too wide."""
    if not is_terminal():
        return indent + command
    width = max(20, shutil.get_terminal_size().columns - 2)  # of the backslash
    return textwrap.fill(
        command, width, initial_indent=indent, subsequent_indent=f"{indent}  ", break_long_words=False,
        break_on_hyphens=False,
    ).replace("\n", " \\\n")  # fmt: skip
