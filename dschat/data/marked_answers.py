"""Extraction of marked answers: the last \\boxed{…}, the last <answer>…</answer>."""

from __future__ import annotations

import re

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)  # escaped braces are text
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """Content of the last \\boxed{…} or \\fbox{…} of a text, nested braces included; None without a closed one."""
    opened: list[int | None] = []  # start of each box still open; None for other braces
    last = (-1, -1)
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            start = opened.pop() if opened else None
            last = last if start is None else max(last, (start, brace.start()))
        elif brace[0].endswith("{") and brace[0] != "\\{":
            opened.append(None if brace[0] == "{" else brace.end())
    return None if last[0] < 0 else text[slice(*last)]


def last_tagged(text: str) -> str | None:
    """Text between the last <answer> and </answer>; None without such a pair."""
    return (_TAGGED.findall(text) or [None])[-1]
