"""Validate texts as values of flags, and as paths. Does not import torch."""

from __future__ import annotations

LONGEST_PATH, LONGEST_NAME = 4096, 255  # bytes, on Linux


def text_problem(text: str) -> str:
    """Why a text cannot be the value of a flag (empty, control characters, too long for a path), or ""."""
    if not text.strip():
        return "is empty: set a value, or remove the flag"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "is not valid UTF-8: rename the file, or set a locale of UTF-8 such as LC_ALL=C.UTF-8"
    if not text.isprintable():
        return "contains a line break or another control character: remove it"
    return "" if "?" in text and "://" not in text else path_problem(text)


def path_problem(text: str) -> str:
    """Why a text cannot be a path, or "". Parts of a URL may be longer; bytes that are not UTF-8 are allowed."""
    sizes = [len(part.encode("utf-8", "surrogateescape")) for part in text.split("/")]
    size = sum(sizes) + len(sizes) - 1
    too_long = size >= LONGEST_PATH or (max(sizes) > LONGEST_NAME and "://" not in text)
    return f"has {size} bytes, more than a path may have" if too_long else ""
