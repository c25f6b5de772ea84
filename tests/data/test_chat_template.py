import pytest
from tiny_tokenizers import BOS_HEADERS, CHATML, NO_END, NO_PREFIX, make_tokenizer
from transformers import AutoTokenizer

from dschat.data.chat_template import (
    encode_conversation,
    encode_prompt,
    encode_text,
    end_of_turn_id,
    ensure_chat_template,
    stop_token_ids,
)

USER = {"role": "user", "content": "Please add 17 and 4."}
ANSWER = {"role": "assistant", "content": "It is 21."}
AGAIN = {"role": "user", "content": "What is 2 plus 3?"}
SECOND = {"role": "assistant", "content": "Of course: 5."}
SYSTEM = {"role": "system", "content": "Be brief."}


def installed(**options):
    tokenizer = make_tokenizer(**options)
    ensure_chat_template(tokenizer)
    return tokenizer


TOKENIZERS = {
    "own template, pad is eos": lambda: installed(),
    "own template, bos is eos is pad, bos added": lambda: installed(bos="</s>", adds_bos=True),
    "own template, bos added": lambda: installed(bos="<s>", pad="<pad>", adds_bos=True),
    "chatml, eos is its end": lambda: make_tokenizer(eos="<|im_end|>", pad="<|im_end|>", template=CHATML),
    "chatml, eos is another": lambda: make_tokenizer(eos="</s>", template=CHATML),
    "bos in the template and in the tokenizer": lambda: make_tokenizer(bos="<s>", adds_bos=True, template=BOS_HEADERS),
    "no end token": lambda: make_tokenizer(template=NO_END),
    "no prefix": lambda: make_tokenizer(template=NO_PREFIX),
}


@pytest.fixture(params=TOKENIZERS, scope="module")
def tokenizer(request):
    return TOKENIZERS[request.param]()


def spans(mask):
    """[start, stop) of the runs of True."""
    edges = [i for i in range(1, len(mask) + 1) if mask[i - 1] != (mask[i] if i < len(mask) else False)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_installed_template_has_the_documented_text():
    messages = [SYSTEM, USER, ANSWER, AGAIN]
    rendered = installed().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "Be brief.\n\nHuman: Please add 17 and 4.\n\nAssistant: It is 21.</s>\n\nHuman: What is 2 plus 3?\n\nAssistant:"
    )


def test_installed_template_is_saved_and_an_existing_one_is_kept(tmp_path):
    tokenizer = make_tokenizer()
    assert ensure_chat_template(tokenizer) is True
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert encode_prompt(loaded, [USER]) == encode_prompt(tokenizer, [USER])
    assert ensure_chat_template(loaded) is False
    chatml = make_tokenizer(template=CHATML)
    assert ensure_chat_template(chatml) is False and chatml.chat_template == CHATML


def test_tokenizer_without_eos_is_refused():
    with pytest.raises(ValueError, match="no EOS token.*--add_eot_token"):
        ensure_chat_template(make_tokenizer(eos=None, pad=None))


def test_prompt_ids_equal_those_of_transformers(tokenizer):
    messages = [USER, ANSWER, AGAIN]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encode_prompt(tokenizer, messages) == expected


def test_bos_occurs_once_at_the_start():
    for name in ("own template, bos added", "bos in the template and in the tokenizer"):
        tokenizer = TOKENIZERS[name]()
        ids, _ = encode_conversation(tokenizer, [USER, ANSWER, AGAIN, SECOND])
        assert [i for i, token in enumerate(ids) if token == tokenizer.bos_token_id] == [0]


def test_trained_tokens_follow_the_prompt_and_end_with_one_end_token(tokenizer):
    """Single turn, every tokenizer: ids = encode_prompt + response + end; exactly the latter two are trained."""
    ids, mask = encode_conversation(tokenizer, [USER, ANSWER])
    prompt = encode_prompt(tokenizer, [USER])
    assert ids[: len(prompt)] == prompt
    assert mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    response = ids[len(prompt) :]
    stops = stop_token_ids(tokenizer)
    assert [token in stops for token in response] == [False] * (len(response) - 1) + [True]
    assert tokenizer.decode(response[:-1]).strip() == "It is 21."


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name[:2] != "no"])
def test_every_turn_of_a_conversation_is_trained_after_its_own_prompt(name):
    tokenizer = TOKENIZERS[name]()
    ids, mask = encode_conversation(tokenizer, [SYSTEM, USER, ANSWER, AGAIN, SECOND])
    first, second = spans(mask)
    assert ids[: first[0]] == encode_prompt(tokenizer, [SYSTEM, USER])
    assert ids[: second[0]] == encode_prompt(tokenizer, [SYSTEM, USER, ANSWER, AGAIN])
    assert second[1] == len(ids)  # text after the last end token is cut off
    end = end_of_turn_id(tokenizer)
    for (start, stop), text in ((first, "It is 21."), (second, "Of course: 5.")):
        assert ids[stop - 1] == end and end not in ids[start : stop - 1]
        assert tokenizer.decode(ids[start : stop - 1]).strip() == text


@pytest.mark.parametrize("name", ["no end token", "no prefix"])
def test_templates_whose_turns_cannot_be_located_train_the_last_turn_with_eos(name):
    tokenizer = TOKENIZERS[name]()
    ids, mask = encode_conversation(tokenizer, [USER, ANSWER, AGAIN, SECOND])
    ((start, stop),) = spans(mask)
    assert ids[:start] == encode_prompt(tokenizer, [USER, ANSWER, AGAIN]) and stop == len(ids)
    assert tokenizer.decode(ids[start : stop - 1]).strip() == "Of course: 5."
    assert ids[-1] == tokenizer.eos_token_id


def test_a_template_that_opens_the_last_answer_with_a_thought_trains_it_as_the_model_generates_it():
    """Such templates render the empty thought in the last answer only; earlier answers begin right after the header."""
    thought = "('<no thought>' if loop.last and message['role'] == 'assistant' else '')"
    tokenizer = make_tokenizer(template=CHATML.replace("message['content']", thought + " + message['content']"))
    ids, mask = encode_conversation(tokenizer, [USER, ANSWER, AGAIN, SECOND])
    trained = [tokenizer.decode(ids[start:stop]) for start, stop in spans(mask)]
    assert trained == ["It is 21.<|im_end|>", "<no thought>Of course: 5.<|im_end|>"]


def test_a_newline_after_the_last_end_token_is_cut_off():
    tokenizer = TOKENIZERS["chatml, eos is another"]()
    ids, _ = encode_conversation(tokenizer, [USER, ANSWER])
    rendered = tokenizer.apply_chat_template([USER, ANSWER], tokenize=False)
    assert rendered == tokenizer.decode(ids) + "\n"


def test_an_empty_answer_trains_its_end_alone(tokenizer):
    """The actor may generate such answers, and a reward model scores them."""
    ids, mask = encode_conversation(tokenizer, [USER, {"role": "assistant", "content": ""}])
    ((start, stop),) = spans(mask)
    assert ids[:start] == encode_prompt(tokenizer, [USER])
    assert tokenizer.decode(ids[start:-1]).strip() == "" and ids[-1] in stop_token_ids(tokenizer)


def test_train_on_prompt_trains_all_but_the_first_token(tokenizer):
    ids, mask = encode_conversation(tokenizer, [USER, ANSWER], train_on_prompt=True)
    assert mask == [False] + [True] * (len(ids) - 1)
    assert ids == encode_conversation(tokenizer, [USER, ANSWER])[0]


@pytest.mark.parametrize("adds_eos", [False, True])
def test_text_gets_one_eos_and_the_tokenizers_own_bos(adds_eos):
    tokenizer = make_tokenizer(bos="<s>", adds_bos=True, adds_eos=adds_eos)
    ids, mask = encode_text(tokenizer, "It is 5.")
    assert tokenizer.decode(ids) == "<s>It is 5.</s>"
    assert mask == [False] + [True] * (len(ids) - 1)


def test_stop_tokens_are_eos_and_end_of_turn_without_duplicates():
    im_end, eos = 3, 0  # their indices in the list of special tokens
    assert stop_token_ids(TOKENIZERS["chatml, eos is another"]()) == [eos, im_end]
    assert stop_token_ids(TOKENIZERS["chatml, eos is its end"]()) == [im_end]
    assert stop_token_ids(TOKENIZERS["no end token"](), 4) == [eos, 4]
    assert stop_token_ids(installed(), [eos, 4, 4]) == [eos, 4]


def test_refusal_of_the_template_is_a_value_error():
    with pytest.raises(ValueError, match="rejects.*unknown role: narrator"):
        encode_prompt(installed(), [{"role": "narrator", "content": "x"}])
    with pytest.raises(ValueError, match="end with an assistant message"):
        encode_conversation(installed(), [USER])
