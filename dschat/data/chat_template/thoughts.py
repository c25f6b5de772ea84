"""Training targets for reasoning templates, whose generation prompt opens a thought ("<think>\\n").

The model then generates the rest of the thought, its end tag, and the answer (DeepSeek-R1, Qwen3-Thinking). Answers
in the data may contain the whole thought, the part after the opening tag, or none.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_OPENING = re.compile(r"(<(?:think|thinking|thought|reasoning)>|\[THINK\])(\s*)\Z")


class BegunThought(NamedTuple):
    """The end of a prompt that opens a thought: the opening tag and the whitespace after it."""

    tag: str
    blanks: str

    @property
    def end(self) -> str:
        return f"{self.tag[0]}/{self.tag[1:]}"


def begun_thought(prompt: str) -> BegunThought | None:
    """The thought that a rendered prompt opens for the answer; None if it opens none."""
    found = _OPENING.search(prompt[-64:])
    return None if found is None else BegunThought(*found.groups())


def generated_text(begun: BegunThought | None, content: str, *, lead: str) -> str:
    """What a model has to generate after a prompt, for an answer of this content.

    The result continues the thought that the prompt opened; if the content has none, it closes the thought at once.

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
    """Whether a response closes the thought that its prompt opened, without opening it again."""
    return begun.end in response and not response.lstrip().startswith(begun.tag)
