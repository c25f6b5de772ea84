"""Parses the messages and tools of a row: chat lists, plain strings, Human/Assistant transcripts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dschat.arguments.strict_json import parse_json
from dschat.distributed.terminal import quoted

from .chat_template import Message

ROLES = ("system", "user", "assistant", "tool")


def parse_messages(value: Any, name: str, *, speaker: str) -> list[Message]:
    """A field as messages; a plain string becomes one message with the role `speaker`."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{name} is empty")
        return _transcript(value) or [{"role": speaker, "content": value}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a string or a list of messages, not {_type_name(value)}")
    return [_message(message, f"{name}[{i}]") for i, message in enumerate(value)]


def with_system(system: Any, messages: list[Message]) -> list[Message]:
    """The messages after a row's `system` prompt, unless they begin with one."""
    if not system or messages[0]["role"] == "system":
        return messages
    if not isinstance(system, str):
        raise ValueError(f"system must be text, not {_type_name(system)}")
    return [{"role": "system", "content": system}, *messages]


def parse_tools(value: Any) -> list[dict[str, Any]]:
    """Tools in the format of chat templates; many datasets store them as JSON text."""
    try:
        tools = parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"tools is {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("tools must be a list of JSON objects")
    return tools


def _message(message: Any, name: str) -> Message:
    """Role, content and optional tool fields; content may be empty in an assistant message with tool calls."""
    if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & set(message):
        raise ValueError(f'{name} must be {{"role": ..., "content": ...}}')
    extra = {key: message[key] for key in ("name", "tool_call_id", "tool_calls") if message.get(key)}
    calls = extra.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"{name} has tool_calls {quoted(calls)}; they must be a list of JSON objects")
    role, content = message["role"], message.get("content")
    if role == "assistant" and "tool_calls" in extra and content is None:
        content = ""
    if role not in ROLES:
        raise ValueError(f"{name} has role {quoted(role)}; use one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"{name} has content of type {_type_name(content)}; it must be text")
    if not content.strip() and role not in ("system", "tool") and "tool_calls" not in extra:
        raise ValueError(f"{name} ({role}) is empty")
    return {"role": role, "content": content, **extra}


def _transcript(text: str) -> list[Message] | None:
    """The turns of "Human: a\\n\\nAssistant: b\\n\\nHuman: c\\n\\nAssistant:"; None if the text is no transcript."""
    if not re.match(r"\s*Human:", text) or "\n\nAssistant:" not in text:
        return None
    parts = re.split(r"(?:^|\n\n)(Human|Assistant):", "\n\n" + text.lstrip())
    roles = ["user" if speaker == "Human" else "assistant" for speaker in parts[1::2]]
    contents = [part.strip() for part in parts[2::2]]
    if contents[-1] == "" and roles[-1] == "assistant":  # the generation prompt at the end
        roles, contents = roles[:-1], contents[:-1]
    if "" in contents:
        raise ValueError("a turn of the Human/Assistant transcript is empty")
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
