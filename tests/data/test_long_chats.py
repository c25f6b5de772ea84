"""Long conversations: turns are located as by rendering every prompt, in time linear in their number."""

import json

import pytest
from test_chat_families import FAMILIES, TOOL_CHAT, TOOLS, TURNS, tokenizer_of
from test_chat_template import TOKENIZERS
from tiny_tokenizers import CHATML, make_tokenizer

from dschat.data.chat_template import assistant_turns, encode_answer, encode_conversation
from dschat.data.datasets import DataOptions, build_dataset

AWKWARD = ["  5.\n", "Assistant: no", "<|im_end|> </s>", "user", "\n\n", "x", "Again? Again?", "é 漢 🙂"]


def long_chat(turns, contents=("Please add 17 and 4.", "It is 21.", "a")):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"{contents[i % len(contents)]} {i}"} for i in range(2 * turns)]


def by_rendering_every_prompt(monkeypatch, tokenizer, messages, **options):
    with monkeypatch.context() as patch:
        patch.setattr(assistant_turns, "RENDERED_TURNS", 10**9)
        return encode_conversation(tokenizer, messages, **options)


@pytest.mark.parametrize("name", [*FAMILIES, *TOKENIZERS])
def test_turns_of_long_chats_are_those_found_by_rendering_every_prompt(name, monkeypatch):
    tokenizer = tokenizer_of(name, marked=False) if name in FAMILIES else TOKENIZERS[name]()
    awkward = [text if text.strip() else f"{text}." for text in AWKWARD]
    chats = [long_chat(20), long_chat(15, awkward)]
    if name not in ("gemma", "mistral"):
        chats.append([{"role": "system", "content": "Be brief."}, *long_chat(12)])
    for messages in chats:
        assert encode_conversation(tokenizer, messages) == by_rendering_every_prompt(monkeypatch, tokenizer, messages)


def test_turns_of_a_long_chat_with_tools_are_those_found_by_rendering_every_prompt(monkeypatch):
    tokenizer = tokenizer_of("qwen", marked=False)
    twice = [*TOOL_CHAT[:3], TOOL_CHAT[2], *TOOL_CHAT[3:]]  # two tool answers in a row
    for messages in (TOOL_CHAT * 9, (TOOL_CHAT + TURNS + twice) * 4):
        ids, mask = encode_conversation(tokenizer, messages, tools=TOOLS)
        assert (ids, mask) == by_rendering_every_prompt(monkeypatch, tokenizer, messages, tools=TOOLS)
        assert sum(b and not a for a, b in zip(mask, mask[1:], strict=False)) == sum(
            message["role"] == "assistant" for message in messages
        )


TEMPLATES = {  # each violates an assumption under which turns are not rendered one by one
    "rewrites contents": CHATML.replace("message['content']", "message['content'] | replace('a', 'e')"),
    "shows thoughts after the last question only": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        + CHATML.replace(
            "message['content']",
            "(message['content'] if loop.index0 > ns.last else message['content'].split('</think>')[-1])",
        )
    ),
    "numbers its messages": CHATML.replace("message['role']", "message['role'] + (loop.index0 | string)"),
    "marks the first and the last message": CHATML.replace(
        "message['content']", "('!' if loop.first else '?' if loop.last else '') + message['content']"
    ),
    "writes the number of messages": "{{ messages | length }}" + CHATML,
    "marks the twelfth message": CHATML.replace(
        "message['content']", "('six' if loop.index == 12 else '') + message['content']"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_of_templates_that_depend_on_the_position_are_those_found_by_rendering_every_prompt(name, monkeypatch):
    tokenizer = make_tokenizer(template=TEMPLATES[name])
    for contents in (("a", "b"), ("add", "<think>b</think>c")):
        messages = long_chat(15, contents)
        assert encode_conversation(tokenizer, messages) == by_rendering_every_prompt(monkeypatch, tokenizer, messages)


class Counted:
    """Counts messages that are rendered and characters that are encoded."""

    def __init__(self, tokenizer, monkeypatch):
        self.messages, self.characters = 0, 0
        render, encode = type(tokenizer).apply_chat_template, type(tokenizer).__call__

        def counted_render(this, messages, **options):
            self.messages += len(messages)
            return render(this, messages, **options)

        def counted_encode(this, text, **options):
            self.characters += len(text)
            return encode(this, text, **options)

        monkeypatch.setattr(type(tokenizer), "apply_chat_template", counted_render)
        monkeypatch.setattr(type(tokenizer), "__call__", counted_encode)


@pytest.mark.parametrize("family", FAMILIES)
def test_work_grows_with_the_number_of_turns(family, monkeypatch):
    tokenizer = tokenizer_of(family, marked=False)
    counted = Counted(tokenizer, monkeypatch)
    work = []
    for turns in (100, 200, 400):
        before = counted.messages, counted.characters
        encode_conversation(tokenizer, long_chat(turns))
        work.append((counted.messages - before[0], counted.characters - before[1]))
    assert work[2][0] <= 8 * 800, "a few renderings of the whole"
    assert work[2][0] <= 2.2 * work[1][0] <= 2.2 * 2.2 * work[0][0]
    assert work[2][1] <= 2.3 * work[1][1] <= 2.3 * 2.3 * work[0][1]
    before = counted.messages
    encode_answer(tokenizer, long_chat(400)[:-1], "fine")
    assert counted.messages - before <= 3 * 800, "the number of renderings for a reward model is constant"


@pytest.mark.parametrize("name", ["chatml", "shows thoughts after the last question only"])
def test_rendering_is_linear_under_a_template_that_rewrites_earlier_answers(name, monkeypatch):
    tokenizer = make_tokenizer(template=TEMPLATES.get(name, CHATML))
    counted = Counted(tokenizer, monkeypatch)
    for turns in (50, 200):
        before = counted.messages
        encode_conversation(tokenizer, long_chat(turns, ("add", "<think>b</think>c")))
        assert counted.messages - before <= 8 * 2 * turns, "a few renderings of the whole"


def test_where_every_prompt_is_rendered_encoding_is_linear_and_the_cost_is_logged_once(monkeypatch, caplog):
    tokenizer = make_tokenizer(template=TEMPLATES["rewrites contents"])
    counted = Counted(tokenizer, monkeypatch)
    characters = []
    for turns in (40, 160, 160):
        before = counted.characters
        encode_conversation(tokenizer, long_chat(turns, ("add", "b")))
        characters.append(counted.characters - before)
    assert characters[1] <= 4 * 1.3 * characters[0]
    (warning,) = [record.message for record in caplog.records if "rendered one by one" in record.message]
    assert "conversation of 320 messages" in warning and "grows with the square" in warning


def test_a_pair_after_many_turns_has_the_prompt_and_ends_of_the_whole(tmp_path):
    tokenizer = tokenizer_of("llama-3", marked=False)
    prompt = long_chat(20)[:-1]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": prompt, "chosen": "yes", "rejected": "no"}) + "\n")
    options = DataOptions([str(file)], str(tmp_path), 4096, eval_fraction=0)
    row = build_dataset("preference", tokenizer, options).train[0]
    for name, answer in (("chosen", "yes"), ("rejected", "no")):
        whole = [*prompt, {"role": "assistant", "content": answer}]
        assert row[f"{name}_ids"] == encode_conversation(tokenizer, whole)[0]
