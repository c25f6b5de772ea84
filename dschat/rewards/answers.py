"""A batch of answered prompts, as reward sources see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dschat.data.chat_template import Message


@dataclass(frozen=True)
class Answers:
    """B responses and what was asked.

    Attributes:
        messages: the prompts as chats.
        responses: their texts, without special tokens.
        token_ids: their tokens, the EOS included.
        rows: other columns of the prompts' data rows, such as the true answer.
        ended: False where a response was cut instead of ending by an EOS.
        max_tokens: longest response allowed, the EOS included.
    """

    messages: list[list[Message]]
    responses: list[str]
    token_ids: list[list[int]]
    rows: list[dict]
    ended: list[bool]
    max_tokens: int

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def prompts(self) -> list[str]:
        """The texts of each prompt's messages, a line each."""
        return [prompt_text(chat) for chat in self.messages]

    def part(self, which: slice) -> Answers:
        """Some of them."""
        columns = {name: values[which] for name, values in vars(self).items() if name != "max_tokens"}
        return Answers(**columns, max_tokens=self.max_tokens)


def prompt_text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)
