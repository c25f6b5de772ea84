"""The history of a chat, kept within the model's positions."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from dschat.data.chat_template import Message, encode_prompt


class Conversation:
    """The message history, truncated so that prompts fit into the model's positions.

    Args:
        system: system message kept at the start, or None.
        positions: of the model; None: no limit.
        max_new_tokens: tokens reserved for the answer, at most half the positions.
        parse_special_tokens: encode control-token strings in lines as control tokens; by default as plain text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        positions: int | None = None,
        max_new_tokens: int = 256,
        parse_special_tokens: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.parse_special_tokens = parse_special_tokens
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.positions = positions
        self.max_new_tokens = max_new_tokens
        self.turns: list[list[Message]] = []  # each [user] or [user, assistant]
        self.count = 0  # user messages so far: seeds the sampling of each answer

    def reset(self) -> None:
        self.turns = []

    def add_user_message(self, text: str) -> tuple[list[int], int, int]:
        """Append a user message; drops the oldest turns until prompt and answer fit.

        Returns:
            prompt ids, maximum number of new tokens, number of turns dropped.

        Raises:
            ValueError: this message alone does not fit, or the chat template rejects it; it is not added.
        """
        turns = [*self.turns, [{"role": "user", "content": text}]]
        limit = None if self.positions is None else self.positions - min(self.max_new_tokens, self.positions // 2)
        dropped = 0
        ids = self._encode(turns)
        while limit is not None and len(ids) > limit and len(turns) > 1:
            turns.pop(0)
            dropped += 1
            ids = self._encode(turns)
        if limit is not None and len(ids) > limit:
            raise ValueError(
                f"this message makes a prompt of {len(ids)} tokens, but only {limit} of the model's {self.positions} "
                "positions are available beside the answer: shorten it, or lower --max_new_tokens"
            )
        self.turns = turns
        self.count += 1
        max_new_tokens = self.max_new_tokens
        if self.positions is not None:
            max_new_tokens = min(max_new_tokens, self.positions - len(ids))
        return ids, max_new_tokens, dropped

    def add_answer(self, text: str) -> None:
        """Append the answer; an empty one removes its user message, because templates require alternating roles."""
        if text.strip():
            self.turns[-1].append({"role": "assistant", "content": text.strip()})
        else:
            self.turns.pop()

    def _encode(self, turns: list[list[Message]]) -> list[int]:
        messages = self.system + [message for turn in turns for message in turn]
        return encode_prompt(self.tokenizer, messages, parse_special_tokens=self.parse_special_tokens)
