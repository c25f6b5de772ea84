"""Requests for scores: the JSON body of POST /score, parsed and validated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dschat.data.chat_template import Message
from dschat.rewards.server.limits import Limits


@dataclass(frozen=True)
class ScoreRequest:
    """A valid request: B prompts as chats, B responses, and which of these ended with an EOS."""

    messages: list[list[Message]]
    responses: list[str]
    ended: list[bool]


class TooLarge(ValueError):
    """A valid request that exceeds the size limits."""


def parse_score_request(body: bytes, limits: Limits) -> ScoreRequest:
    """Parse and validate a JSON body; unused fields are ignored.

    OpenRLHF's {"query": [prompt + response, …], "prompts": […]} is understood too; its prompts are user messages.

    Raises:
        TooLarge: more messages or characters than the limits allow.
        ValueError: the body is invalid.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON ({type(error).__name__})") from error
    if not isinstance(fields, dict):
        raise ValueError('the body must be an object: {"messages": [[...], ...], "responses": ["...", ...]}')
    if "query" in fields and "responses" not in fields:
        fields |= _from_queries(fields["query"], fields.get("prompts"))
    messages, responses = fields.get("messages"), fields.get("responses")
    if not (isinstance(responses, list) and responses and all(isinstance(text, str) for text in responses)):
        raise ValueError("responses must be a list of texts, at least one")
    if len(responses) > limits.max_rows:
        raise ValueError(f"{len(responses)} responses exceed the limit of {limits.max_rows} per request: split it")
    if not (isinstance(messages, list) and all(map(_is_chat, messages))):
        raise ValueError('messages must be a list of chats: [[{"role": "user", "content": "..."}], ...]')
    ended = fields.get("ended", [True] * len(responses))
    if not (isinstance(ended, list) and all(isinstance(value, bool) for value in ended)):
        raise ValueError("ended must be a list of true and false")
    if not len(messages) == len(responses) == len(ended):
        raise ValueError(
            f"{len(messages)} messages, {len(responses)} responses and {len(ended)} ended: the numbers must be equal"
        )
    _check_size(messages, responses, limits)
    # Only these two keys are passed to the chat template; others could change how it renders.
    chats = [[{name: message[name] for name in ("role", "content")} for message in chat] for chat in messages]
    try:
        json.dumps([chats, responses], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text contains a lone surrogate, which is not a character") from error
    return ScoreRequest(chats, responses, ended)


def _from_queries(queries: Any, prompts: Any) -> dict[str, list]:
    """Messages and responses of OpenRLHF's fields; each query is its prompt followed by the response."""
    valid = isinstance(queries, list) and isinstance(prompts, list) and len(queries) == len(prompts) and all(
        isinstance(query, str) and isinstance(prompt, str) and query.startswith(prompt)
        for query, prompt in zip(queries, prompts, strict=True)
    )  # fmt: skip
    if not valid:
        raise ValueError("query and prompts must be lists of texts of one length, each query beginning with its prompt")
    pairs = list(zip(queries, prompts, strict=True))
    return {
        "messages": [[{"role": "user", "content": prompt}] for _, prompt in pairs],
        "responses": [query[len(prompt) :] for query, prompt in pairs],
    }


def _check_size(messages: list[list[Message]], responses: list[str], limits: Limits) -> None:
    """Raise TooLarge for large requests: encoding time grows with size, and requests are encoded one by one."""
    count = sum(map(len, messages))
    if count > limits.max_messages:
        raise TooLarge(f"{count} messages exceed the limit of {limits.max_messages} per request: split or shorten it")
    characters = sum(map(len, responses))
    characters += sum(len(message[name]) for chat in messages for message in chat for name in ("role", "content"))
    if characters > limits.max_characters:
        raise TooLarge(
            f"{characters} characters exceed the limit of {limits.max_characters} per request: split or shorten it"
        )


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    )
