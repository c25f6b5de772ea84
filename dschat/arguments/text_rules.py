"""Which texts can be the value of a flag. No import of torch."""

from __future__ import annotations

LONGEST_PATH, LONGEST_NAME = 4096, 255  # bytes, on Linux


def broken_text_rule(text: str) -> str:
    """Why a text can be no value of a flag, or "": empty, control characters, longer than any path."""
    if not text.strip():
        return "is empty: give a value, or drop the flag"
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        return "is not valid UTF-8: rename the file, or set a locale of UTF-8 such as LC_ALL=C.UTF-8"
    if not text.isprintable():
        return "holds a line break or another control character: take it out"
    is_path = "://" not in text and "?" not in text
    if size >= LONGEST_PATH or (is_path and max(len(part.encode()) for part in text.split("/")) > LONGEST_NAME):
        return f"has {size} bytes, more than a path may have"
    return ""
