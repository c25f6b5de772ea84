"""Messages -> token ids, through the tokenizer's own chat template, and which of these tokens are trained.

One law holds everywhere: the trained tokens of an assistant turn are what the model would have to generate after
`encode_prompt` of the messages before it, up to and including one end-of-turn token. So a model learns to stop with
the very token at which generation stops (`stop_token_ids`). No id is ever compared with the pad id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]  # {"role": ..., "content": ...}, perhaps "name", "tool_call_id", "tool_calls"
Tools = Sequence[dict[str, Any]]  # JSON schemas of functions, as transformers takes them

# The generation prompt ends with ":" and the space belongs to the response: " Yes" is one token in most
# vocabularies, so ids(prompt) stays a prefix of ids(prompt + response).
_TURNS = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{- message['content'] -}}
{%- elif message['role'] == 'user' -%}
{{- '\\n\\nHuman: ' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{{- '\\n\\nAssistant: ' + message['content'] + eos_token -}}
{%- elif message['role'] == 'tool' -%}
{{- '\\n\\nTool: ' + message['content'] -}}
{%- else -%}
{{- raise_exception('unknown role: ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '\\n\\nAssistant:' -}}
{%- endif -%}
"""
_BOS = "{{- bos_token -}}\n"

_PROBE = "Xqprobeqx"  # survives every template unchanged: no spaces, no markup


def ensure_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Give the tokenizer a Human/Assistant chat template if it has none; `save_pretrained` then saves it.

    The text is "<system>\\n\\nHuman: …\\n\\nAssistant: …<eos>", preceded by the BOS where the tokenizer puts one before
    plain text. This is the one function here that changes its argument.

    Returns:
        True if a template was installed, False if the tokenizer had one.

    Raises:
        ValueError: the tokenizer has no EOS token, so no response could end.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has no EOS token, so a response could never end: "
            "set one (--add_eot_token adds '<|endoftext|>'), or choose a model whose tokenizer has one."
        )
    if tokenizer.chat_template:
        return False
    begins_with_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    tokenizer.chat_template = (_BOS if begins_with_bos else "") + _TURNS
    return True


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, tools: Tools | None = None
) -> list[int]:
    """Ids of the messages followed by the template's opening of an assistant turn: what generation starts from.

    Raises:
        ValueError: the chat template refuses these messages.
    """
    return _ids(tokenizer, _render(tokenizer, messages, add_generation_prompt=True, tools=tools))


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    train_on_prompt: bool = False,
    end_id: int | None = None,
    tools: Tools | None = None,
) -> tuple[list[int], list[bool]]:
    """Ids of a conversation that ends with an assistant message, and which of them are trained.

    Every assistant turn is trained where the template allows it: each prompt must be a prefix of the whole in ids,
    and the template must close turns with a token of its own. Otherwise (a template without an end token, one that
    rewrites earlier turns, a tokenizer that merges across the border) the ids are those of the prompt, of the last
    response as plain text, and EOS; then the last response alone is trained.

    Args:
        train_on_prompt: train every token but the first (which nothing predicts).
        end_id: `end_of_turn_id(tokenizer)` if the caller has it already, to save the probe.
        tools: what the template shows of tools that may be called.

    Returns:
        input_ids, loss_mask: lists of equal length, True on trained tokens; both end with the end-of-turn token.

    Raises:
        ValueError: no assistant message at the end, or the chat template refuses the messages, or gives tool calls at
            the end no place of their own.
    """
    if not messages or messages[-1]["role"] != "assistant":
        raise ValueError("a conversation must end with an assistant message")
    end_id = end_of_turn_id(tokenizer) if end_id is None else end_id
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = [encode_prompt(tokenizer, messages[:i], tools=tools) for i in turns]
    whole = _ids(tokenizer, _render(tokenizer, messages, add_generation_prompt=False, tools=tools))
    spans = _response_spans(whole, prompts, end_id)
    if spans is None:
        if messages[-1].get("tool_calls"):
            raise ValueError("the chat template writes tool calls in a way that cannot be told from their prompt")
        response = _ids(tokenizer, _last_response_text(tokenizer, messages, tools=tools))
        whole = prompts[-1] + response + [tokenizer.eos_token_id]
        spans = [(len(prompts[-1]), len(whole))]
    whole = whole[: spans[-1][1]]  # text after the last end token ("\n" in ChatML) is never generated
    mask = [train_on_prompt] * len(whole)
    for start, stop in spans:
        mask[start:stop] = [True] * (stop - start)
    mask[0] = False
    return whole, mask


def decode_responses(tokenizer: PreTrainedTokenizerBase, responses: Sequence[Sequence[int]]) -> list[str]:
    """Generated ids → contents of assistant messages: the way back from `encode_conversation`.

    Special tokens are left out, and so is what the template itself writes before a response: the space after
    "Assistant:" is generated by the model, and a message that kept it would be encoded with two.
    """
    turn = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
    lead = _last_response_text(tokenizer, turn).removesuffix(_PROBE)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return [text.removeprefix(lead) for text in texts]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[bool]]:
    """Ids of plain text with the tokenizer's own BOS and one EOS; all trained but the first, which nothing predicts."""
    ids = list(tokenizer(text).input_ids)
    if ids[-1:] != [tokenizer.eos_token_id]:  # some tokenizers append it themselves
        ids.append(tokenizer.eos_token_id)
    return ids, [False] + [True] * (len(ids) - 1)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the template writes first after an assistant's text; None if it writes none.

    Found by rendering a probe: "<|im_end|>\\n" after the probe gives the id of <|im_end|>.
    """
    turn = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
    after = _render(tokenizer, turn, add_generation_prompt=False).rpartition(_PROBE)[2]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return next((i for i in _ids(tokenizer, after) if i in special), None)


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config_eos: int | Iterable[int] | None = None
) -> list[int]:
    """Ids that end a response: the tokenizer's EOS, the template's end of turn, the model's generation config."""
    if generation_config_eos is None:
        configured: list[int] = []
    elif isinstance(generation_config_eos, int):
        configured = [generation_config_eos]
    else:
        configured = list(generation_config_eos)
    end_id = end_of_turn_id(tokenizer) if tokenizer.chat_template else None
    return list(dict.fromkeys(i for i in (tokenizer.eos_token_id, end_id, *configured) if i is not None))


def _response_spans(whole: list[int], prompts: list[list[int]], end_id: int | None) -> list[tuple[int, int]] | None:
    """[start, stop) of every response inside `whole`, its end token included; None where ids do not line up."""
    spans = []
    for n, prompt in enumerate(prompts):
        start = len(prompt)
        limit = len(prompts[n + 1]) if n + 1 < len(prompts) else len(whole)
        if end_id is None or whole[:start] != prompt or end_id not in whole[start:limit]:
            return None
        spans.append((start, whole.index(end_id, start) + 1))
    return spans


def _last_response_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, tools: Tools | None = None
) -> str:
    """The last message's text, with what the template puts between its opening and the text (often a space)."""
    content = messages[-1]["content"]
    if not content:  # an actor may answer with nothing
        return ""
    opening = _render(tokenizer, messages[:-1], add_generation_prompt=True, tools=tools)
    rendered = _render(tokenizer, messages, add_generation_prompt=False, tools=tools)
    before, found, _ = rendered.removeprefix(opening).partition(content)
    return before + content if found and rendered.startswith(opening) else content


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Tools | None = None,
) -> str:
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error


def _ids(tokenizer: PreTrainedTokenizerBase, rendered: str) -> list[int]:
    """The template alone decides about BOS, as `apply_chat_template(tokenize=True)` has it: none is added here."""
    return list(tokenizer(rendered, add_special_tokens=False).input_ids)
