"""Renders a conversation through its chat template, as text and as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .control_tokens import ControlTokens, control_tokens, strings_in

Message = dict[str, Any]  # {"role": ..., "content": ...}, optional "name", "tool_call_id", "tool_calls"
Tools = Sequence[dict[str, Any]]  # JSON schemas of functions, as transformers takes them


@dataclass(frozen=True)
class ChatRenderer:
    """Renders one conversation from its first message up to any other, always in the same way.

    Args:
        tools: JSON schemas of callable functions, passed to the template.
        control: the tokenizer's control tokens.
        escapes_control_tokens: contents contain control-token strings that must stay text: in the text that `render`
            returns, the template's own control tokens have private names.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: Tools | None
    control: ControlTokens
    escapes_control_tokens: bool
    _last_prompt: dict[int, str] = field(default_factory=dict, repr=False)  # number of messages → text

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, tools: Tools | None = None,
        parse_special_tokens: bool = False,
    ) -> ChatRenderer:  # fmt: skip
        """The renderer of these messages and of every prefix of them.

        Args:
            parse_special_tokens: encode control-token strings inside contents as control tokens.
        """
        control = control_tokens(tokenizer)
        escapes_control_tokens = not parse_special_tokens and bool(control.found_in(strings_in([messages, tools])))
        return cls(tokenizer, tools, control, escapes_control_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Raises ValueError: the chat template rejects these messages."""
        messages, tools = list(messages), self.tools
        if self.escapes_control_tokens:
            messages, tools = self.control.insert_placeholders(messages), self.control.insert_placeholders(tools)
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise ValueError(f"the chat template rejects these messages: {error}") from error
        return self.control.resolve_placeholders(text) if self.escapes_control_tokens else text

    def ids(self, text: str) -> list[int]:
        """No BOS is added beyond the template's own, as in `apply_chat_template(tokenize=True)`.

        Raises: ValueError: the tokenizer cannot encode a control-token string inside a content as plain text.
        """
        if self.escapes_control_tokens:
            return self.control.encode(self.tokenizer, text)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def prompt(self, messages: Sequence[Message]) -> str:
        """The messages followed by the template's generation prompt; the last result is cached."""
        if len(messages) not in self._last_prompt:
            self._last_prompt.clear()
            self._last_prompt[len(messages)] = self.render(messages, add_generation_prompt=True)
        return self._last_prompt[len(messages)]

    def conversation(self, messages: Sequence[Message]) -> str:
        return self.render(messages, add_generation_prompt=False)

    def control_offsets(self, text: str) -> list[tuple[int, int]]:
        """(character offset, id) of every control token in a rendered text."""
        return self.control.offsets(text, private=self.escapes_control_tokens)
