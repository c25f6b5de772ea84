"""Encodes messages through the tokenizer's own chat template: token ids and loss mask.

Invariant: the trained tokens of an assistant turn are what the model would have to generate after `encode_prompt` of
the preceding messages, up to and including one end-of-turn token. So a model learns to stop with the same token that
ends generation (`stop_token_ids`). No id is ever compared with the pad id.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from .assistant_turns import answer_starts
from .control_tokens import control_tokens
from .rendering import ChatRenderer, Message, Tools
from .stop_tokens import PROBE, end_of_turn_id
from .thoughts import closes_thought, generated_text, opened_thought


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, tools: Tools | None = None,
    parse_special_tokens: bool = False,
) -> list[int]:  # fmt: skip
    """Ids of the messages followed by the template's generation prompt.

    Args:
        parse_special_tokens: control-token strings inside contents become control tokens. By default contents are
            encoded as plain text.

    Raises:
        ValueError: the chat template rejects these messages.
    """
    renderer = ChatRenderer.of(tokenizer, messages, tools=tools, parse_special_tokens=parse_special_tokens)
    return renderer.ids(renderer.prompt(messages))


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    train_on_prompt: bool = False,
    end_id: int | None = None,
    tools: Tools | None = None,
    parse_special_tokens: bool = False,
) -> tuple[list[int], list[bool]]:
    """Ids and loss mask of a conversation that ends with an assistant message.

    Every assistant turn is trained where the template allows it: each prompt's ids must be a prefix of the whole,
    and the template must close turns with a special token. Otherwise (a template without an end token, one that
    rewrites earlier turns, a tokenizer that merges across the boundary) the ids are those of the prompt, of the last
    response as plain text, and EOS; then only the last response is trained.

    Args:
        train_on_prompt: train every token but the first, which has no prediction.
        end_id: `end_of_turn_id(tokenizer)` if already computed, to avoid the probe.
        tools: JSON schemas of callable functions, passed to the template.
        parse_special_tokens: see encode_prompt.

    Returns:
        input_ids, loss_mask: lists of equal length, True on trained tokens; both end with the end-of-turn token.

    Raises:
        ValueError: no assistant message at the end, or the chat template rejects the messages, or the tool calls of
            the last one cannot be separated from its prompt.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[-1] != len(messages) - 1:
        raise ValueError("a conversation must end with an assistant message")
    renderer = ChatRenderer.of(tokenizer, messages, tools=tools, parse_special_tokens=parse_special_tokens)
    ids, spans = _with_responses(renderer, messages, turns, end_id)
    mask = [train_on_prompt] * len(ids)
    for start, stop in spans:
        mask[start:stop] = [True] * (stop - start)
    mask[0] = False
    return ids, mask


def encode_answer(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[Message],
    answer: str,
    *,
    end_id: int | None = None,
    tools: Tools | None = None,
    parse_special_tokens: bool = False,
) -> tuple[list[int], list[int]]:
    """Ids of a prompt, as from `encode_prompt`, and of the answer to it, which end with the end-of-turn token.

    Earlier answers are part of the prompt. Arguments and errors as in `encode_conversation`.
    """
    messages = [*prompt, {"role": "assistant", "content": answer}]
    renderer = ChatRenderer.of(tokenizer, messages, tools=tools, parse_special_tokens=parse_special_tokens)
    ids, ((start, _),) = _with_responses(renderer, messages, [len(prompt)], end_id)
    return ids[:start], ids[start:]


def decode_responses(tokenizer: PreTrainedTokenizerBase, responses: Sequence[Sequence[int]]) -> list[str]:
    """Generated ids → contents of assistant messages: the inverse of `encode_conversation`.

    Removes special tokens and the text that the template itself writes before a response: the model generates the
    space after "Assistant:", and a message that kept it would be encoded with two.
    """
    turn = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    lead = _last_response_text(ChatRenderer.of(tokenizer, turn), turn).removesuffix(PROBE)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return [text.removeprefix(lead) for text in texts]


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, *, parse_special_tokens: bool = False
) -> tuple[list[int], list[bool]]:
    """Ids of plain text with the tokenizer's BOS and one EOS; all trained but the first, which has no prediction.

    Args:
        parse_special_tokens: see encode_prompt.
    """
    control = control_tokens(tokenizer)
    if parse_special_tokens or not control.found_in([text]):
        ids = list(tokenizer(text).input_ids)
    else:
        probe_ids = tokenizer("a").input_ids
        begins_with_bos = tokenizer.bos_token_id is not None and probe_ids[0] == tokenizer.bos_token_id
        ids = [tokenizer.bos_token_id] * begins_with_bos + control.encode(tokenizer, text)
    if ids[-1:] != [tokenizer.eos_token_id]:  # some tokenizers append it themselves
        ids.append(tokenizer.eos_token_id)
    return ids, [False] + [True] * (len(ids) - 1)


def _with_responses(
    renderer: ChatRenderer, messages: Sequence[Message], turns: Sequence[int], end_id: int | None
) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids that end with the last response, and [start, stop) of the responses among them, end tokens included.

    Args:
        turns: indices of the responses to locate; only the last is returned if the prompts are not prefixes.
    """
    tokenizer = renderer.tokenizer
    end_id = end_of_turn_id(tokenizer) if end_id is None else end_id
    text = renderer.conversation(messages)
    ids = renderer.ids(text)
    starts = None if end_id is None else answer_starts(renderer, messages, turns, text, ids)
    spans = None if starts is None else _response_spans(ids, starts, end_id)
    opening = renderer.prompt(messages[:-1])
    thought = opened_thought(opening)
    if spans and all(thought is None or closes_thought(thought, tokenizer.decode(ids[i:j])) for i, j in spans):
        return ids[: spans[-1][1]], spans  # text after the last end token ("\n" in ChatML) is never generated
    if messages[-1].get("tool_calls"):
        raise ValueError("the chat template writes tool calls where they cannot be separated from the prompt")
    prompt = renderer.ids(opening)
    ids = prompt + renderer.ids(_last_response_text(renderer, messages)) + [tokenizer.eos_token_id]
    return ids, [(len(prompt), len(ids))]


def _response_spans(ids: list[int], starts: list[int], end_id: int) -> list[tuple[int, int]] | None:
    """[start, stop) of every response, end token included; None if one has no end token."""
    spans = []
    for start, limit in zip(starts, [*starts[1:], len(ids)], strict=True):
        if end_id not in ids[start:limit]:
            return None
        spans.append((start, ids.index(end_id, start) + 1))
    return spans


def _last_response_text(renderer: ChatRenderer, messages: Sequence[Message]) -> str:
    """What the model would have to generate for the last message, without an end token.

    That is its content, preceded by what the template writes between the generation prompt and the content (often a
    space), or by the rest of a thought that the generation prompt opens.
    """
    content = messages[-1]["content"]
    if not content:  # an actor may generate an empty response
        return ""
    opening, rendered = renderer.prompt(messages[:-1]), renderer.conversation(messages)
    before, match, _ = rendered.removeprefix(opening).partition(content)
    lead = before if match and rendered.startswith(opening) else ""
    return generated_text(opened_thought(opening), content, lead=lead)
