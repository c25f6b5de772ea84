"""Parses and validates records: a row of a file → plain messages, or the reason why it is invalid.

Four kinds of record. A row may be used as several: a preference row also gives an SFT example (its chosen response),
a prompt, and two unpaired responses, so that one file can be used in all three steps.

    prompt      prompt | messages (without its last answer) | chosen + rejected (their common prefix)
    sft         messages | prompt + response | prompt + chosen | text
    preference  prompt + chosen + rejected | chosen + rejected (whole conversations) [, margin, chosen_ended, …]
    unpaired    prompt + response (or completion) + label (true: desirable) | a preference row, as two

Optional columns: `system` (prepended to the messages, unless they begin with a system prompt) and `tools` (for the
chat template). A field is a string or a chat list [{"role": ..., "content": ...}, ...]. A string prompt is one user
message, unless it is a transcript "\\n\\nHuman: ...\\n\\nAssistant:", which is split into turns (the
format of DeepSpeed-Chat's data sets).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dschat.distributed.terminal import quoted

from .chat_template import Message
from .messages import parse_messages, parse_tools, with_system

KINDS = ("prompt", "sft", "preference", "unpaired")
_LARGEST_FLOAT32 = 3.4028234663852886e38  # the largest margin that fits the float32 loss
COLUMNS = {
    "prompt": "prompt, or messages",
    "sft": "messages, or prompt + response, or text",
    "preference": "prompt + chosen + rejected",
    "unpaired": "prompt + response + label, or prompt + chosen + rejected",
}


class MissingColumn(ValueError):
    """The row lacks the required columns; if every row does, it is the wrong file."""


def parse_record(row: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The messages of one row.

    Returns:
        "prompt": {"prompt": messages}. "sft": {"messages": messages that end with an assistant's} or {"text": str}.
        "preference": {"prompt": messages, "chosen": str, "rejected": str, "margin": float or None}.
        "unpaired": {"prompt": messages, "answers": [(str, whether it is desirable), ...]}: one, or two of a pair.
        And optionally "tools": a list of dicts; "cut": indices of the answers (chosen 0, rejected 1) that were
        truncated by a length limit when they were sampled.

    Raises:
        MissingColumn: the row lacks the columns of this kind.
        ValueError: a bad row, with a short reason.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: choose one of {', '.join(KINDS)}")
    parsers = {"prompt": _prompt_record, "sft": _sft_record, "preference": _preference_record,
               "unpaired": _unpaired_record}  # fmt: skip
    record = parsers[kind](row)
    for name in ("prompt", "messages"):
        if name in record:
            record[name] = with_system(row.get("system"), record[name])
    return record | ({"tools": parse_tools(row["tools"])} if row.get("tools") and "text" not in record else {})


def _prompt_record(row: Mapping[str, Any]) -> dict[str, Any]:
    if _has(row, "prompt"):
        prompt = parse_messages(row["prompt"], "prompt", speaker="user")
    elif _has(row, "messages"):
        prompt = parse_messages(row["messages"], "messages", speaker="user")
        prompt = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt
    elif _has(row, "chosen", "rejected"):
        prompt = _preference_record(row)["prompt"]
    else:
        raise _missing(row, "prompt")
    return {"prompt": _validated_prompt(prompt)}


def _sft_record(row: Mapping[str, Any]) -> dict[str, Any]:
    answer = next((name for name in ("response", "chosen") if _has(row, name)), None)
    if _has(row, "messages"):
        messages = parse_messages(row["messages"], "messages", speaker="user")
    elif answer and _has(row, "prompt"):
        prompt = _validated_prompt(parse_messages(row["prompt"], "prompt", speaker="user"))
        messages = prompt + [{"role": "assistant", "content": _answer(row[answer], answer, prompt)}]
    elif answer == "chosen":
        messages = parse_messages(row["chosen"], "chosen", speaker="assistant")
    elif _has(row, "text"):
        if not isinstance(row["text"], str) or not row["text"].strip():
            raise ValueError("text must be a string that is not empty")
        return {"text": row["text"]}
    else:
        raise _missing(row, "sft")
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"the last message is of role {messages[-1]['role']!r}, not 'assistant'")
    if len(messages) == 1:
        raise ValueError("the answer has no prompt")
    uses_chosen = answer == "chosen" and not _has(row, "messages")
    return {"messages": messages, **(_cut_off(row, "chosen") if uses_chosen else {})}


def _preference_record(row: Mapping[str, Any]) -> dict[str, Any]:
    if not _has(row, "chosen", "rejected"):
        raise _missing(row, "preference")
    if _has(row, "prompt"):
        prompt = parse_messages(row["prompt"], "prompt", speaker="user")
    else:
        chosen, rejected = (parse_messages(row[name], name, speaker="assistant") for name in ("chosen", "rejected"))
        if len(chosen) == 1 and len(rejected) == 1:
            raise MissingColumn("no prompt: neither a column of that name, nor shared by chosen and rejected")
        shared = 0
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        prompt = chosen[:shared]
    prompt = _validated_prompt(prompt)
    return {
        "prompt": prompt,
        "chosen": _answer(row["chosen"], "chosen", prompt),
        "rejected": _answer(row["rejected"], "rejected", prompt),
        "margin": _margin(row.get("margin")),
        **_cut_off(row, "chosen", "rejected"),
    }


def _unpaired_record(row: Mapping[str, Any]) -> dict[str, Any]:
    answer = next((name for name in ("response", "completion") if _has(row, name)), None)
    if answer and _has(row, "prompt", "label"):
        desirable = _parse_bool(row["label"], "label", rule="neither true (desirable) nor false")
        prompt = _validated_prompt(parse_messages(row["prompt"], "prompt", speaker="user"))
        return {"prompt": prompt, "answers": [(_answer(row[answer], answer, prompt), desirable)]}
    if _has(row, "chosen", "rejected"):
        pair = _preference_record(row)
        answers = [(pair["chosen"], True), (pair["rejected"], False)]
        return {"prompt": pair["prompt"], "answers": answers, **_cut_off(row, "chosen", "rejected")}
    raise _missing(row, "unpaired")


def _cut_off(row: Mapping[str, Any], *names: str) -> dict[str, list[int]]:
    """{"cut": indices of these answers that were truncated when sampled}; {} if none was."""
    cut = [index for index, name in enumerate(names) if not _ended(row.get(f"{name}_ended"), f"{name}_ended")]
    return {"cut": cut} if cut else {}


def _ended(value: Any, name: str) -> bool:
    return True if value in (None, "") else _parse_bool(value, name, rule="neither true nor false")


def _parse_bool(value: Any, name: str, *, rule: str) -> bool:
    """True, false, 1 or 0; also as text, which is all that a csv file can hold."""
    names = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    text = str(value).strip().lower()
    if text not in names:
        raise ValueError(f"{name} {quoted(value)} is {rule}")
    return names[text]


def _answer(value: Any, name: str, prompt: list[Message]) -> str:
    """The text of the one assistant message that `value` adds to the prompt."""
    messages = parse_messages(value, name, speaker="assistant")
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    elif len(messages) > 1 and messages[0]["role"] != "assistant":
        raise ValueError(f"{name} is a conversation that does not begin with the prompt")
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise ValueError(f"{name} must add exactly one assistant message to the prompt, not {len(messages)} messages")
    if "tool_calls" in messages[0]:
        raise ValueError(f"{name} calls tools: a preferred answer must be text")
    return messages[0]["content"]


def _validated_prompt(prompt: list[Message]) -> list[Message]:
    if not prompt:
        raise ValueError("the prompt is empty")
    if prompt[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant message, but must end before the answer")
    return prompt


def _margin(value: Any) -> float | None:
    if value is None or value == "":
        return None
    try:
        margin = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not math.isfinite(margin):
        raise ValueError(f"margin {quoted(value)} is not a finite number")
    if abs(margin) > _LARGEST_FLOAT32:
        raise ValueError(f"margin {quoted(value)} is out of the range of float32 (at most {_LARGEST_FLOAT32:.1e})")
    return margin


def _has(row: Mapping[str, Any], *names: str) -> bool:
    return all(row.get(name) is not None for name in names)


def _missing(row: Mapping[str, Any], kind: str) -> MissingColumn:
    present = ", ".join(str(name) for name in row if row[name] is not None) or "none"
    return MissingColumn(f"no usable column: a {kind} row needs {COLUMNS[kind]}; it has {present}")
