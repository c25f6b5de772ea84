"""Templates whose generation prompt opens a thought: the trained tokens are those a model generates after it."""

import pytest
from test_chat_template import spans
from tiny_tokenizers import CHATML, make_tokenizer

from dschat.data.chat_template import decode_responses, encode_answer, encode_conversation, encode_prompt
from dschat.rewards.reward_model import conversation_ids

OPENED = CHATML.replace("<|im_start|>assistant\n'", "<|im_start|>assistant\n<think>\n'")
CONTENT = "message['content']"
TEMPLATES = {
    # The history keeps the content unchanged.
    "kept": OPENED,
    # DeepSeek-R1: the history contains no thoughts.
    "removed": OPENED.replace(CONTENT, "message['content'].split('</think>')[-1]"),
    # Qwen3-Thinking: the last answer always has a thought.
    "last": OPENED.replace(
        CONTENT,
        "(('<think>\n' + (message['content'].split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in "
        "message['content'] else '') + '\n</think>\n\n' + message['content'].split('</think>')[-1].lstrip('\n')) "
        "if loop.last and message['role'] == 'assistant' else message['content'].split('</think>')[-1])",
    ),
    # Every answer follows an opened thought, whatever its content.
    "always": OPENED.replace(
        "message['role'] + '\n'", "message['role'] + ('\n<think>\n' if message['role'] == 'assistant' else '\n')"
    ),  # fmt: skip
}
CONTENTS = {  # content → what comes after "<think>\n"
    "<think>\n17 and 4\n</think>\n\nIt is 21.": "17 and 4\n</think>\n\nIt is 21.",
    "17 and 4\n</think>\n\nIt is 21.": "17 and 4\n</think>\n\nIt is 21.",  # as such a model generates it
    "It is 21.": "\n</think>\n\nIt is 21.",
}
USER, AGAIN = ({"role": "user", "content": text} for text in ("Please add 17 and 4.", "Again?"))


def make(template, tags):
    tokenizer = make_tokenizer(eos="<|im_end|>", template=TEMPLATES[template])
    if tags:  # one token each, as in the models' own tokenizers
        tokenizer.add_tokens(["<think>", "</think>", "\n\n"])
    return tokenizer


@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_thought_is_opened_once_and_closed_once(template, content, tags):
    tokenizer = make(template, tags)
    answer = {"role": "assistant", "content": content}
    for before in ([USER], [USER, answer, AGAIN]):
        ids, mask = encode_conversation(tokenizer, [*before, answer])
        prompt = encode_prompt(tokenizer, before)
        start, stop = spans(mask)[-1]
        assert ids[:start] == prompt and stop == len(ids) and tokenizer.decode(prompt).endswith("assistant\n<think>\n")
        assert tokenizer.decode(ids[start:]) == CONTENTS[content] + "<|im_end|>"
        assert encode_answer(tokenizer, before, content) == (prompt, ids[start:])
        assert conversation_ids(tokenizer, before, content, ended=True, max_tokens=999) == ids


def test_every_turn_of_a_history_that_keeps_its_thoughts_is_trained():
    tokenizer = make("kept", True)
    answer = {"role": "assistant", "content": "<think>\na\n</think>\n\nb"}
    ids, mask = encode_conversation(tokenizer, [USER, answer, AGAIN, answer])
    assert [tokenizer.decode(ids[i:j]) for i, j in spans(mask)] == ["a\n</think>\n\nb<|im_end|>"] * 2
    without_thought = {"role": "assistant", "content": "b"}  # would be trained inside a thought that is never closed
    ids, mask = encode_conversation(tokenizer, [USER, without_thought, AGAIN, answer])
    assert [tokenizer.decode(ids[i:j]) for i, j in spans(mask)] == ["a\n</think>\n\nb<|im_end|>"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_generated_response_is_decoded_and_encoded_to_the_same_text(template):
    tokenizer = make(template, True)
    for generated in set(CONTENTS.values()):
        (content,) = decode_responses(tokenizer, [tokenizer(generated + "<|im_end|>").input_ids])
        assert tokenizer.decode(encode_answer(tokenizer, [USER], content)[1]) == generated + "<|im_end|>"


def test_other_thought_tags_are_recognised_and_prompts_without_one_are_unchanged():
    for tag, end in (("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"), ("<reasoning>", "</reasoning>")):
        tokenizer = make_tokenizer(eos="<|im_end|>", template=OPENED.replace("<think>", tag))
        _, response = encode_answer(tokenizer, [USER], f"{tag}a{end}b")
        assert tokenizer.decode(response) == f"a{end}b<|im_end|>"
    plain = make_tokenizer(eos="<|im_end|>", template=CHATML)
    for content in CONTENTS:
        assert plain.decode(encode_answer(plain, [USER], content)[1]) == f"{content}<|im_end|>"
