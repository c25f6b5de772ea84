"""Training targets for reasoning templates, whose generation prompt opens a thought ("<think>\\n").

The model then generates the rest of the thought, its end tag, and the answer (DeepSeek-R1, Qwen3-Thinking). Answers
in the data may contain the whole thought, the part after the opening tag, or none.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_OPENING = re.compile(r"(<(?:think|thinking|thought|reasoning)>|\[THINK\])(\s*)\Z")


class OpenedThought(NamedTuple):
    """The end of a prompt that opens a thought: the opening tag and the whitespace after it."""

    tag: str
    whitespace: str

    @property
    def end(self) -> str:
        return f"{self.tag[0]}/{self.tag[1:]}"


def opened_thought(prompt: str) -> OpenedThought | None:
    """The thought that a rendered prompt opens for the answer; None if it opens none."""
    match = _OPENING.search(prompt[-64:])
    return None if match is None else OpenedThought(*match.groups())


def generated_text(opened: OpenedThought | None, content: str, *, lead: str) -> str:
    """What a model has to generate after a prompt, for an answer of this content.

    The result continues the thought that the prompt opened; if the content has none, it closes the thought at once.

    Args:
        lead: what the template itself puts between the prompt and this content.
    """
    if opened is None:
        return lead + content
    if content.lstrip().startswith(opened.tag):
        inside = content.lstrip().removeprefix(opened.tag)
        return inside.removeprefix(opened.whitespace) if inside.startswith(opened.whitespace) else inside.lstrip()
    if opened.end in content:
        return content
    return lead + content if opened.end in lead else f"\n{opened.end}\n\n{content}"


def closes_thought(opened: OpenedThought, response: str) -> bool:
    """Whether a response closes the thought that its prompt opened, without opening it again."""
    return opened.end in response and not response.lstrip().startswith(opened.tag)
