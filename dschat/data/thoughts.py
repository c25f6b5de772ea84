"""Answers after a chat template that opens a thought itself: its generation prompt ends with "<think>\\n".

A model then generates the rest of the thought, its end, and the answer (DeepSeek-R1, Qwen3-Thinking). Data holds
answers with the whole thought, with the rest of one, or with none.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_OPENING = re.compile(r"(<(?:think|thinking|thought|reasoning)>|\[THINK\])(\s*)\Z")


class BegunThought(NamedTuple):
    """What a prompt ends with: the tag that opens a thought, and the blanks after it."""

    tag: str
    blanks: str

    @property
    def end(self) -> str:
        return f"{self.tag[0]}/{self.tag[1:]}"


def begun_thought(prompt: str) -> BegunThought | None:
    """The thought that a rendered prompt opens for the answer; None where it opens none."""
    found = _OPENING.search(prompt[-64:])
    return None if found is None else BegunThought(*found.groups())


def generated_text(begun: BegunThought | None, content: str, *, lead: str) -> str:
    """What a model has to generate after a prompt, for an answer of this content.

    A thought that the prompt began is gone on with, and closed at once where the content has none.

    Args:
        lead: what the template itself puts between the prompt and this content.
    """
    if begun is None:
        return lead + content
    if content.lstrip().startswith(begun.tag):
        inside = content.lstrip().removeprefix(begun.tag)
        return inside.removeprefix(begun.blanks) if inside.startswith(begun.blanks) else inside.lstrip()
    if begun.end in content:
        return content
    return lead + content if begun.end in lead else f"\n{begun.end}\n\n{content}"


def goes_on_with(begun: BegunThought, response: str) -> bool:
    """Whether a response closes the thought that its prompt began, and does not begin it again."""
    return begun.end in response and not response.lstrip().startswith(begun.tag)
