"""Text of models, data and services on its way to a terminal, which must not obey it."""

from __future__ import annotations

# Cc but newline and tab (C0, DEL and C1: escape sequences, titles, bells, carriage returns), what reorders the text
# around it, what ends lines elsewhere, and halves of surrogate pairs, which no console can write.
_RANGES = [
    (0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F), (0x2028, 0x2029), (0x202A, 0x202E), (0x2066, 0x2069), (0xD800, 0xDFFF),
]  # fmt: skip
_VISIBLE = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for first, last in _RANGES
    for code in range(first, last + 1)
}


def printable(text: object) -> str:
    r"""The text with control characters as escapes: "\x1b[31m" and "\u202e" are printed, not obeyed.

    Newlines, tabs and letters of every script stay. Character by character, so that pieces of a stream may be given.
    """
    return str(text).translate(_VISIBLE)
