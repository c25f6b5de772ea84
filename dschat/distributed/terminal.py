"""Escape control characters in text from models, data and services before it is printed."""

from __future__ import annotations

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
