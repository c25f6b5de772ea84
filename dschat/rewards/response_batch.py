"""Input of the reward sources: a batch of responses with their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dschat.data.chat_template import Message


@dataclass(frozen=True)
class ResponseBatch:
    """B responses with their prompts.

    Attributes:
        messages: prompts as chat messages.
        responses: response texts, without special tokens.
        token_ids: response tokens, the EOS included.
        rows: other columns of the prompts' data rows, such as the reference answer.
        ended: False where a response was truncated instead of ending with an EOS.
        max_tokens: maximum response length, the EOS included.
        is_chat: True where the data row's prompt is a list of messages, not a text; empty: nowhere.
    """

    messages: list[list[Message]]
    responses: list[str]
    token_ids: list[list[int]]
    rows: list[dict]
    ended: list[bool]
    max_tokens: int
    is_chat: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def chats(self) -> list[bool]:
        """is_chat of each response."""
        return self.is_chat or [False] * len(self)

    @property
    def prompts(self) -> list[str]:
        """The texts of each prompt's messages, one per line."""
        return [prompt_text(chat) for chat in self.messages]

    def part(self, which: slice) -> ResponseBatch:
        """A slice of the batch."""
        columns = {name: values[which] for name, values in vars(self).items() if name != "max_tokens"}
        return ResponseBatch(**columns, max_tokens=self.max_tokens)


def prompt_text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)
