"""Chat templates in the style of common model families: spans of assistant turns, tools, system prompts."""

import pytest
from tiny_tokenizers import make_tokenizer

from dschat.data.chat_template import encode_conversation, encode_prompt, end_of_turn_id
from dschat.data.encoding import Encoder
from dschat.data.records import parse_record

GENERATION_TAGS = ("{% generation %}", "{% endgeneration %}")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<start_of_turn>model\n' }}{% generation %}"
    "{{ m['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (  # no header before an answer
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ ' ' + m['content'] | trim + eos_token }}{% endgeneration %}{% elif m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ raise_exception('only user and assistant') }}{% endif %}"
    "{% endfor %}"
)
QWEN = (  # a default system prompt; tools, tool calls, tool answers in a user's turn
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% else %}"
    "{% set system = 'You are a helpful assistant.' %}{% endif %}{{ '<|im_start|>system\n' + system }}"
    "{% if tools %}{{ '\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools>' }}"
    "{% endif %}{{ '<|im_end|>\n' }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}{% generation %}{{ m['content'] }}{% for call in m.get('tool_calls') or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% elif m['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>' + m['content'] + '</tool_response><|im_end|>\n' }}"
    "{% elif m['role'] == 'user' %}{{ '<|im_start|>user\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FAMILIES = {"chatml": CHATML, "llama-3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "qwen": QWEN}
SPECIAL = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]
ENDS = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>",
        "qwen": "<|im_end|>"}  # fmt: skip

TURNS = [
    {"role": "user", "content": "Please add 17 and 4."},
    {"role": "assistant", "content": "It is 21."},
    {"role": "user", "content": "What is 2 plus 3?"},
    {"role": "assistant", "content": "Of course: 5."},
    {"role": "user", "content": "Again?"},
    {"role": "assistant", "content": "5."},
]
CALL = {"function": {"name": "add", "arguments": {"a": 17, "b": 4}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
TOOL_CHAT = [
    TURNS[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "21", "name": "add", "tool_call_id": "1"},
    TURNS[1],
]


def tokenizer_of(family, *, marked):
    template = FAMILIES[family]
    for tag in () if marked else GENERATION_TAGS:
        template = template.replace(tag, "")
    tokenizer = make_tokenizer(bos="<s>", template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *SPECIAL]})
    return tokenizer


def marked_tokens(tokenizer, messages, **options):
    """Ids, and the mask that transformers makes from the template's generation tags."""
    encoding = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **options)
    return encoding["input_ids"], [bool(mark) for mark in encoding["assistant_masks"]]


def trained_texts(tokenizer, ids, mask):
    texts, previous = [], False
    for token, trained in zip(ids, mask, strict=True):
        if trained:
            texts = [*texts[:-1], [*texts[-1], token]] if previous else [*texts, [token]]
        previous = trained
    return [tokenizer.decode(text) for text in texts]


@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_the_assistant_turns_and_their_end_tokens_are_trained(family):
    tokenizer = tokenizer_of(family, marked=False)
    ids, mask = encode_conversation(tokenizer, TURNS)
    prefix = " " if family == "mistral" else ""
    expected = [f"{prefix}{turn['content']}{ENDS[family]}" for turn in TURNS if turn["role"] == "assistant"]
    assert trained_texts(tokenizer, ids, mask) == expected
    assert tokenizer.decode([end_of_turn_id(tokenizer)]) == ENDS[family]
    rendered = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert tokenizer.decode(ids) == rendered.removesuffix("\n")


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_spans_equal_those_of_generation_tags_and_do_not_need_the_tags(family):
    marked, plain = tokenizer_of(family, marked=True), tokenizer_of(family, marked=False)
    ids, mask = encode_conversation(marked, TURNS)
    assert (ids, mask) == encode_conversation(plain, TURNS)
    all_ids, all_marks = marked_tokens(marked, TURNS)
    assert (all_ids[: len(ids)], all_marks[: len(ids)]) == (ids, mask) and not any(all_marks[len(ids) :])


@pytest.mark.parametrize("family", ["chatml", "llama-3", "qwen"])
def test_a_system_prompt_is_encoded_and_not_trained(family):
    tokenizer = tokenizer_of(family, marked=True)
    messages = [{"role": "system", "content": "Be brief."}, *TURNS]
    ids, mask = encode_conversation(tokenizer, messages)
    assert "Be brief." in tokenizer.decode(ids) and "You are a helpful" not in tokenizer.decode(ids)
    all_ids, all_marks = marked_tokens(tokenizer, messages)
    assert (all_ids[: len(ids)], all_marks[: len(ids)]) == (ids, mask)


def test_a_default_system_prompt_is_in_the_prompt_as_in_training():
    tokenizer = tokenizer_of("qwen", marked=False)
    ids, mask = encode_conversation(tokenizer, TURNS[:2])
    prompt = encode_prompt(tokenizer, TURNS[:1])
    assert tokenizer.decode(prompt).startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>")
    assert ids[: len(prompt)] == prompt and mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))


@pytest.mark.parametrize("family", ["gemma", "mistral"])
def test_a_template_without_system_prompts_refuses_them(family):
    with pytest.raises(ValueError, match="the chat template rejects these messages"):
        encode_conversation(tokenizer_of(family, marked=True), [{"role": "system", "content": "Be brief."}, *TURNS])


def test_tool_calls_are_trained_and_tool_answers_are_not():
    tokenizer = tokenizer_of("qwen", marked=True)
    record = parse_record({"messages": TOOL_CHAT, "tools": TOOLS}, "sft")
    assert record == {"messages": TOOL_CHAT, "tools": TOOLS}  # unchanged
    ids, mask = encode_conversation(tokenizer, record["messages"], tools=record["tools"])
    call = '<tool_call>{"name": "add", "arguments": {"a": 17, "b": 4}}</tool_call><|im_end|>'
    assert trained_texts(tokenizer, ids, mask) == [call, "It is 21.<|im_end|>"]
    all_ids, all_marks = marked_tokens(tokenizer, TOOL_CHAT, tools=TOOLS)
    assert (all_ids[: len(ids)], all_marks[: len(ids)]) == (ids, mask)
    text = tokenizer.decode(ids)
    assert "<tools>" in text and "<tool_response>21</tool_response>" in text


def test_a_conversation_may_end_with_a_tool_call():
    tokenizer = tokenizer_of("qwen", marked=False)
    ids, mask = encode_conversation(tokenizer, TOOL_CHAT[:2], tools=TOOLS)
    (text,) = trained_texts(tokenizer, ids, mask)
    assert text.startswith("<tool_call>") and text.endswith("<|im_end|>")
    template = FAMILIES["qwen"]
    for part in ("<|im_end|>", *GENERATION_TAGS):
        template = template.replace(part, "")
    without_end = make_tokenizer(template=template)
    with pytest.raises(ValueError, match="tool calls"):
        encode_conversation(without_end, TOOL_CHAT[:2], tools=TOOLS)


@pytest.mark.parametrize("kind", ["prompt", "sft", "preference", "unpaired"])
def test_tools_of_a_row_reach_the_template_in_every_kind(kind):
    tokenizer = tokenizer_of("qwen", marked=False)
    encoder = Encoder.for_kind(kind, tokenizer, max_tokens=2000, overlong="drop", train_on_prompt=False)
    row = {"prompt": "Please add 17 and 4.", "chosen": "It is 21.", "rejected": "No.", "tools": TOOLS}
    encodings = encoder.encode(parse_record(row, kind), row, 0)
    assert len(encodings) == (2 if kind == "unpaired" else 1)
    for encoded in encodings:
        ids = encoded.features["chosen_ids" if kind == "preference" else "input_ids"]
        assert '<tools>\n{"type": "function"' in tokenizer.decode(ids)
