"""Bodies of the page's requests → validated values, and the steps of an answer."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chat_model import ChatModel, ChatSettings
from conversation import Conversation

from dschat.arguments.bounds import Bounds
from dschat.arguments.script_inputs import SEEDS
from dschat.arguments.strict_json import parse_json
from dschat.data.chat_template import Message, decode_responses
from dschat.data.messages import parse_messages
from dschat.distributed.terminal import quoted

from .ratings import CHOICES, preference_row

# name → (type, bounds); the largest values are below those of the flags
NUMBERS = {
    "temperature": (float, Bounds(at_least=0, at_most=100)),
    "top_p": (float, Bounds(above=0, at_most=1)),
    "top_k": (int, Bounds(at_least=0, at_most=2**31 - 1)),
    "max_new_tokens": (int, Bounds(at_least=1, at_most=65536)),
    "seed": (int, Bounds(**SEEDS)),
}


@dataclasses.dataclass(frozen=True)
class AnswerRequest:
    """A request for one answer.

    Attributes:
        model: index of the model.
        messages: user and assistant in turns, the last of a user.
        turn, sample_id: seed the random numbers, see ChatModel.answer.
    """

    model: int
    messages: list[Message]
    settings: ChatSettings
    turn: int
    sample_id: int


def parse_answer_request(body: bytes, *, models: int, settings: ChatSettings) -> AnswerRequest:
    """Raises ValueError with the field, its value and the rule.

    Args:
        models: number of models.
        settings: of the command line, for what the page does not send.
    """
    fields = _object(body)
    return AnswerRequest(
        model=_number(fields, "model", int, Bounds(at_least=0, at_most=models - 1)),
        messages=_conversation(fields.get("messages")),
        settings=dataclasses.replace(settings, **parse_settings(fields.get("settings", {}))),
        turn=_number(fields, "turn", int, Bounds(at_least=0, at_most=2**31 - 1)),
        sample_id=_number(fields, "sample_id", int, Bounds(at_least=0, at_most=1)),
    )


def parse_settings(value: Any) -> dict[str, Any]:
    """The sampling settings of a page; all problems are in one ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError("settings must be an object")
    parsed, problems = {}, []
    for name, (kind, bounds) in NUMBERS.items():
        try:
            if name in value:
                parsed[name] = _number(value, name, kind, bounds)
        except ValueError as problem:
            problems.append(str(problem))
    system = value.get("system")
    if system is not None and not isinstance(system, str):
        problems.append(f"system {quoted(system)}: must be a text")
    if problems:
        raise ValueError("; ".join(problems))
    return parsed | ({"system": system.strip() or None} if isinstance(system, str) else {})


def answer_steps(model: ChatModel, request: AnswerRequest, stopped: threading.Event) -> Iterator[dict[str, Any]]:
    """Generate an answer; runs in the generation thread.

    Yields:
        {"dropped": turns} if the conversation is longer than the model's positions; {"text": piece}, a step each; at
        last {"content": the answer as a message, "ended", "stopped", "tokens", "seconds"}, or {"error": reason}.
    """
    conversation = _restored(model, request)
    try:
        ids, max_new_tokens, dropped = conversation.add_user_message(request.messages[-1]["content"])
        answer = model.answer(
            ids, request.settings, max_new_tokens=max_new_tokens, iteration=request.turn, sample_id=request.sample_id
        )
    except ValueError as error:
        yield {"error": str(error)}
        return
    if dropped:
        yield {"dropped": dropped}
    start = time.perf_counter()
    if not stopped.is_set():
        for piece in answer:
            yield {"text": piece}
            if stopped.is_set():
                break
    yield {
        "content": decode_responses(model.tokenizer, [answer.ids])[0],
        "ended": answer.ended,
        "stopped": stopped.is_set() and not answer.ended,
        "tokens": len(answer.ids),
        "seconds": time.perf_counter() - start,
    }


def parse_rating(body: bytes, models: Sequence[ChatModel], *, settings: ChatSettings) -> tuple[dict[str, Any], bool]:
    """The row of a rating, and whether it is a tie.

    Raises: ValueError with the reason if it cannot be saved.
    """
    fields = _object(body)
    choice, answers = fields.get("choice"), fields.get("answers")
    if choice not in CHOICES:
        raise ValueError(f"choice {quoted(choice)}: must be one of {', '.join(CHOICES)}")
    if not isinstance(answers, list) or len(answers) != 2:
        raise ValueError("answers must be a list of two")
    changed = parse_settings(fields.get("settings", {}))
    sampling = dataclasses.asdict(dataclasses.replace(settings, **changed))
    system = sampling.pop("system")
    prompt = _conversation(fields.get("messages"))
    prompt = [{"role": "system", "content": system}, *prompt] if system else prompt
    parsed = [_answer(answer, models) for answer in answers]
    return preference_row(prompt, parsed, choice, sampling=sampling), choice == "tie"


def _answer(value: Any, models: Sequence[ChatModel]) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise ValueError("an answer must have its text as content")
    if not isinstance(value.get("ended"), bool):
        raise ValueError("an answer must say by ended whether it is complete")
    index = _number(value, "model", int, Bounds(at_least=0, at_most=len(models) - 1))
    return {"content": value["content"], "ended": value["ended"], "model": models[index].name}


def _restored(model: ChatModel, request: AnswerRequest) -> Conversation:
    """The conversation before its last message."""
    conversation = model.conversation(request.settings)
    earlier = request.messages[:-1]
    conversation.turns = [list(turn) for turn in zip(earlier[::2], earlier[1::2], strict=True)]
    return conversation


def _object(body: bytes) -> Mapping[str, Any]:
    fields = parse_json(body)
    if not isinstance(fields, Mapping):
        raise ValueError("the body must be a JSON object")
    return fields


def _conversation(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError("messages must be a list")
    messages = parse_messages(value, "messages", speaker="user")
    for number, message in enumerate(messages):
        role = ("user", "assistant")[number % 2]
        if message["role"] != role or "tool_calls" in message:
            raise ValueError(f"messages[{number}] must be a text of the {role}: roles alternate, a user begins")
    if len(messages) % 2 == 0:
        raise ValueError("the last message must be of the user")
    return messages


def _number(fields: Mapping[str, Any], name: str, kind: type, bounds: Bounds) -> Any:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise ValueError(f"{name} {quoted(value)}: must be a {'whole ' if kind is int else ''}number")
    if violation := bounds.violation(value):
        raise ValueError(f"{name} {value}: must be {violation}")
    return value
