"""One conversation as its chat template writes it, and the token ids of that text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .control_tokens import ControlTokens, control_tokens, strings_in

Message = dict[str, Any]  # {"role": ..., "content": ...}, perhaps "name", "tool_call_id", "tool_calls"
Tools = Sequence[dict[str, Any]]  # JSON schemas of functions, as transformers takes them


@dataclass(frozen=True)
class ChatRenderer:
    """Renders one conversation from its first message up to any other, always in the same way.

    Args:
        tools: what the template shows of tools that may be called.
        control: of the tokenizer.
        protects: contents spell control tokens and are to stay text: the template's own have private names in what
            `render` returns.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: Tools | None
    control: ControlTokens
    protects: bool
    _last_prompt: dict[int, str] = field(default_factory=dict, repr=False)  # number of messages → text

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, tools: Tools | None = None,
        parse_special_tokens: bool = False,
    ) -> ChatRenderer:  # fmt: skip
        """The renderer of these messages and any that they begin with.

        Args:
            parse_special_tokens: control tokens that contents spell are meant as such.
        """
        control = control_tokens(tokenizer)
        protects = not parse_special_tokens and bool(control.found_in(strings_in([messages, tools])))
        return cls(tokenizer, tools, control, protects)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Raises ValueError: the chat template refuses these messages."""
        messages, tools = list(messages), self.tools
        if self.protects:
            messages, tools = self.control.hide(messages), self.control.hide(tools)
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return self.control.reveal(text) if self.protects else text

    def ids(self, text: str) -> list[int]:
        """The template alone decides about BOS, as `apply_chat_template(tokenize=True)` has it: none is added here.

        Raises: ValueError: the tokenizer cannot keep a control token that a content spells apart from the token.
        """
        if self.protects:
            return self.control.encode(self.tokenizer, text)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def prompt(self, messages: Sequence[Message]) -> str:
        """The messages, followed by the template's opening of an answer; the last one made is kept."""
        if len(messages) not in self._last_prompt:
            self._last_prompt.clear()
            self._last_prompt[len(messages)] = self.render(messages, add_generation_prompt=True)
        return self._last_prompt[len(messages)]

    def conversation(self, messages: Sequence[Message]) -> str:
        return self.render(messages, add_generation_prompt=False)

    def control_places(self, text: str) -> list[tuple[int, int]]:
        """(index of its first character, id) of every control token in a rendered text."""
        return self.control.places(text, private=self.protects)
