"""Which texts can be the value of a flag. No import of torch."""

from __future__ import annotations

LONGEST_PATH, LONGEST_NAME = 4096, 255  # bytes, on Linux


def broken_text_rule(text: str) -> str:
    """Why a text can be no value of a flag of a step, or "": empty, control characters, longer than any path."""
    if not text.strip():
        return "is empty: give a value, or drop the flag"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "is not valid UTF-8: rename the file, or set a locale of UTF-8 such as LC_ALL=C.UTF-8"
    if not text.isprintable():
        return "holds a line break or another control character: take it out"
    return "" if "?" in text and "://" not in text else broken_path_rule(text)


def broken_path_rule(text: str) -> str:
    """Why no file can have this path, or "". An address may have longer parts; bytes that are no UTF-8 are allowed."""
    sizes = [len(part.encode("utf-8", "surrogateescape")) for part in text.split("/")]
    size = sum(sizes) + len(sizes) - 1
    too_long = size >= LONGEST_PATH or (max(sizes) > LONGEST_NAME and "://" not in text)
    return f"has {size} bytes, more than a path may have" if too_long else ""
