"""Hand-written rows of each supported hub dataset, and the records that they are parsed to."""

import json

import pytest
from datasets import Dataset, DatasetDict
from tiny_tokenizers import make_tokenizer

from dschat.data.chat_template import ensure_chat_template
from dschat.data.datasets import DataOptions, build_dataset
from dschat.data.marked_answers import last_boxed
from dschat.data.records import parse_record
from dschat.data.sources.data_path import load_source
from dschat.data.sources.hub_datasets import HUB_DATASETS, UnusableRow, hub_dataset, mapped_fields


def chat(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def record(name, row, kind):
    return parse_record(mapped_fields(row, HUB_DATASETS[name], {}), kind)


def pair(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": None}


PASSAGES = {"positive_passages": [{"docid": "1", "title": "t", "text": "yes"}], "query": "q",
            "negative_passages": [{"docid": "2", "title": "t", "text": "no"}]}  # fmt: skip
SHP = {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 0, "score_ratio": 2.5}
WEBGPT = {"question": {"full_text": "q", "id": "1"}, "answer_0": "a", "answer_1": "b", "score_0": -0.5, "score_1": 0.5}
HELPSTEER = {"domain": "general", "context": chat("a", "b", "c"), "response1": "one", "response2": "two",
             "overall_preference": -2}  # fmt: skip
PREFERENCES = {
    "Dahoas/rm-static": (
        {"prompt": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", "response": " d", "chosen": " d",
         "rejected": " e"},
        pair(chat("a", "b", "c"), "d", "e"),
    ),
    "Dahoas/full-hh-rlhf": (
        {"prompt": "\n\nHuman: a\n\nAssistant:", "response": " d", "chosen": " d", "rejected": " e"},
        pair(chat("a"), "d", "e"),
    ),
    "Dahoas/synthetic-instruct-gptj-pairwise": (
        {"prompt": "a", "chosen": "d\n", "rejected": "e"},
        pair(chat("a"), "d", "e"),
    ),
    "yitingxie/rlhf-reward-datasets": (
        {"prompt": "\n\nHuman: a\n\n", "chosen": "Assistant: d", "rejected": "Assistant: e"},
        pair(chat("a"), "d", "e"),
    ),
    "openai/webgpt_comparisons": (WEBGPT, pair(chat("q"), "b", "a")),
    "stanfordnlp/SHP": (SHP, pair(chat("q"), "b", "a")),
    "Cohere/miracl-zh-queries-22-12": (PASSAGES, pair(chat("q"), "yes", "no")),
    "Cohere/miracl-ja-queries-22-12": (PASSAGES, pair(chat("q"), "yes", "no")),
    "Anthropic/hh-rlhf": (
        {"chosen": "\n\nHuman: a\n\nAssistant: d", "rejected": "\n\nHuman: a\n\nAssistant: e"},
        pair(chat("a"), "d", "e"),
    ),
    "HuggingFaceH4/ultrafeedback_binarized": (
        {"prompt": "a", "prompt_id": "1", "chosen": chat("a", "d"), "rejected": chat("a", "e"),
         "messages": chat("a", "d"), "score_chosen": 8.0, "score_rejected": 2.0},
        pair(chat("a"), "d", "e"),
    ),
    "nvidia/HelpSteer3": (HELPSTEER, pair(chat("a", "b", "c"), "one", "two")),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": (
        {"id": "1", "prompt": "c", "chosen": chat("a", "b", "c", "d"), "rejected": chat("a", "b", "c", "e")},
        pair(chat("a", "b", "c"), "d", "e"),
    ),
}  # fmt: skip
CONVERSATIONS = {
    "pvduy/sharegpt_alpaca_oa_vicuna_format": (
        {"prompt": "USER: a ASSISTANT: b</s>USER: c ASSISTANT:", "label": "d</s>"}, chat("a", "b", "c", "d")
    ),
    "wangrui6/Zhihu-KOL": ({"INSTRUCTION": "a", "RESPONSE": "b", "SOURCE": "Zhihu"}, chat("a", "b")),
    "Hello-SimpleAI/HC3-Chinese": (
        {"question": "a", "human_answers": ["b", "z"], "chatgpt_answers": ["c"]}, chat("a", "b")
    ),
    "mkqa-Chinese": (
        {"query": "x", "queries": {"zh_cn": "a", "ja": "j"},
         "answers": {"zh_cn": [{"text": "b", "type": 1}], "ja": [{"text": "k", "type": 1}]}},
        chat("a", "b"),
    ),
    "mkqa-Japanese": (
        {"query": "x", "queries": {"zh_cn": "a", "ja": "j"},
         "answers": {"zh_cn": [{"text": "b", "type": 1}], "ja": [{"text": "k", "type": 1}]}},
        chat("j", "k"),
    ),
    "lmqg/qg_jaquad": ({"question": "a", "sentence": "b", "answer": "z", "paragraph": "p"}, chat("a", "b")),
    "lmqg/qag_jaquad": ({"questions": ["a", "z"], "paragraph": "b", "answers": ["y"]}, chat("a", "b")),
    "HuggingFaceH4/ultrachat_200k": (
        {"prompt": "a", "prompt_id": "1", "messages": chat("a", "b")}, chat("a", "b")
    ),
    "allenai/tulu-3-sft-mixture": ({"id": "1", "messages": chat("a", "b"), "source": "s"}, chat("a", "b")),
    "open-r1/OpenR1-Math-220k": (
        {"problem": "a", "solution": "s", "answer": "4", "messages": chat("a", "<think>t</think> 4")},
        chat("a", "<think>t</think> 4"),
    ),
}  # fmt: skip
# Datasets with a reference answer for rewards: row, prompt, answer, SFT response (None: not tested).
ANSWERS = {
    "openai/gsm8k": (
        {"question": "a", "answer": "3*4 is <<3*4=12>>12, times 100.\n#### 1,200"},
        chat("a"), "1200", "3*4 is 12, times 100.\n#### 1,200",
    ),
    "hendrycks/competition_math": (
        {"problem": "a", "solution": r"First $\boxed{1}$, then $\boxed{\frac{1}{2}}$.", "level": "Level 1"},
        chat("a"), r"\frac{1}{2}", r"First $\boxed{1}$, then $\boxed{\frac{1}{2}}$.",
    ),
    "nlile/hendrycks-MATH-benchmark": (
        {"problem": "a", "solution": r"\boxed{7}", "answer": "7"}, chat("a"), "7", r"\boxed{7}"
    ),
    "HuggingFaceH4/MATH-500": (
        {"problem": "a", "solution": r"\boxed{7}", "answer": "7", "level": 1}, chat("a"), "7", r"\boxed{7}"
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        {"data_source": "d", "prompt": chat("a"), "reward_model": {"ground_truth": "34", "style": "rule"}},
        chat("a"), "34", None,
    ),
    "open-r1/DAPO-Math-17k-Processed": ({"prompt": "a", "solution": "34"}, chat("a"), "34", None),
    "open-r1/OpenR1-Math-220k": (
        {"problem": "a", "solution": "s", "answer": "4", "messages": chat("a", "b")}, chat("a"), "4", None
    ),
}  # fmt: skip


def test_every_hub_dataset_has_a_test_row():
    assert PREFERENCES.keys() | CONVERSATIONS.keys() | ANSWERS.keys() == HUB_DATASETS.keys()


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_rows_are_parsed(name):
    row, expected = PREFERENCES[name]
    assert record(name, row, "preference") == expected
    assert record(name, row, "prompt") == {"prompt": expected["prompt"]}
    chosen = {"role": "assistant", "content": expected["chosen"]}
    assert record(name, row, "sft") == {"messages": [*expected["prompt"], chosen]}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversation_rows_are_parsed(name):
    row, messages = CONVERSATIONS[name]
    assert record(name, row, "sft") == {"messages": messages}
    assert record(name, row, "prompt") == {"prompt": messages[:-1]}


@pytest.mark.parametrize("name", ANSWERS)
def test_rows_with_an_answer_are_parsed(name):
    row, prompt, answer, response = ANSWERS[name]
    fields = mapped_fields(row, HUB_DATASETS[name], {})
    assert parse_record(fields, "prompt") == {"prompt": prompt} and fields["answer"] == answer
    if response is not None:
        assert parse_record(fields, "sft") == {"messages": [*prompt, {"role": "assistant", "content": response}]}


@pytest.mark.parametrize(
    ("name", "row", "chosen"),
    [
        ("openai/webgpt_comparisons", WEBGPT | {"score_0": 0.5, "score_1": -0.5}, "a"),
        ("openai/webgpt_comparisons", WEBGPT | {"score_0": 0.0, "score_1": 0.0}, None),
        ("stanfordnlp/SHP", SHP | {"labels": 1}, "a"),
        ("stanfordnlp/SHP", SHP | {"score_ratio": 1.0}, None),
        ("nvidia/HelpSteer3", HELPSTEER | {"overall_preference": 1}, "two"),
        ("nvidia/HelpSteer3", HELPSTEER | {"overall_preference": 0}, None),
    ],
)
def test_labels_decide_which_answer_is_chosen_and_ties_are_left_out(name, row, chosen):
    if chosen is None:
        with pytest.raises(UnusableRow, match="no answer is preferred"):
            record(name, row, "preference")
    else:
        assert record(name, row, "preference")["chosen"] == chosen


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("Cohere/miracl-zh-queries-22-12", PASSAGES | {"positive_passages": []}, "no passage"),
        ("mkqa-Chinese", {"queries": {"zh_cn": "a"}, "answers": {"zh_cn": [{"text": None}]}}, "no answer in this"),
        ("Hello-SimpleAI/HC3-Chinese", {"question": "a", "human_answers": []}, "no human answer"),
        ("HuggingFaceH4/MATH-500", {"problem": "a", "solution": "no box"}, "no boxed answer"),
    ],
)
def test_rows_without_anything_to_learn_are_skipped(name, row, reason):
    with pytest.raises(UnusableRow, match=reason):
        mapped_fields(row, HUB_DATASETS[name], {})


def test_a_damaged_row_is_bad_and_a_row_in_the_suites_own_columns_is_unchanged():
    with pytest.raises(ValueError, match="not a row of this data set .TypeError"):
        mapped_fields(WEBGPT | {"question": "text"}, HUB_DATASETS["openai/webgpt_comparisons"], {})
    own_row = {"prompt": "a", "response": "b"}
    assert mapped_fields(own_row, HUB_DATASETS["openai/gsm8k"], {}) == own_row


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so \boxed{x^{2}+\{1\}}.", r"x^{2}+\{1\}"), (r"\fbox{3}", "3"), (r"\boxed {5}", "5"),
        (r"\boxed{open", None), ("none", None),
    ],
)  # fmt: skip
def test_boxed_answers_have_balanced_braces(solution, answer):
    assert last_boxed(solution) == answer


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def test_a_path_that_ends_with_a_dataset_name_or_is_assigned_to_one_is_read_in_its_schema(tmp_path):
    row, prompt, answer, _ = ANSWERS["openai/gsm8k"]
    inside = write_lines(tmp_path / "openai" / "gsm8k" / "main" / "train.jsonl", [row])
    write_lines(tmp_path / "openai" / "gsm8k" / "socratic" / "train.jsonl", [row] * 3)
    elsewhere = write_lines(tmp_path / "rows.jsonl", [row])
    for path in (str(tmp_path / "openai" / "gsm8k"), f"openai/gsm8k={elsewhere}"):
        (row_read,) = load_source(path).rows("train")
        assert row_read.fields["answer"] == answer and row_read.fields["prompt"] == "a"
    assert hub_dataset("openai/gsm8k") == (HUB_DATASETS["openai/gsm8k"], "openai/gsm8k")
    for plain in (inside, elsewhere, str(tmp_path / "my-openai" / "gsm8k"), "reasoning_gym:chain_sum?size=3"):
        assert hub_dataset(plain) == (None, plain)
    with pytest.raises(ValueError, match="there is no file or folder nowhere; write NAME=PATH"):
        load_source("openai/gsm8k=nowhere")
    assert load_source(f"openai/gsm8k={elsewhere}").identity() != load_source(elsewhere).identity()


def test_one_file_read_in_two_schemas_is_prepared_twice(tokenizer, tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [CONVERSATIONS["mkqa-Chinese"][0]])
    texts = [
        tokenizer.decode(build("sft", tokenizer, tmp_path, f"{name}={path}").train[0]["input_ids"])
        for name in ("mkqa-Chinese", "mkqa-Japanese")
    ]
    assert texts == ["\n\nHuman: a\n\nAssistant: b</s>", "\n\nHuman: j\n\nAssistant: k</s>"]


def test_a_dataset_uses_its_preferred_splits(tmp_path):
    table = Dataset.from_list([{"messages": chat("a", "b")}] * 4)
    splits = {
        name: table.select(range(n + 1)) for n, name in enumerate(["train_gen", "train_sft", "test_gen", "test_sft"])
    }
    DatasetDict(splits).save_to_disk(tmp_path / "HuggingFaceH4" / "ultrachat_200k")
    source = load_source(str(tmp_path / "HuggingFaceH4" / "ultrachat_200k"))
    assert [len(list(source.rows(split))) for split in ("train", "eval")] == [2, 4]
    for name, count in (("train_sft-0", 2), ("train_gen-0", 5), ("test_sft-0", 3)):
        write_lines(tmp_path / "raw" / f"{name}.jsonl", [{"messages": chat("a", "b")}] * count)
    source = load_source(f"HuggingFaceH4/ultrachat_200k={tmp_path / 'raw'}")
    assert [len(list(source.rows(split))) for split in ("train", "eval")] == [2, 3]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = make_tokenizer()
    ensure_chat_template(tokenizer)
    return tokenizer


def build(kind, tokenizer, tmp_path, *paths, **options):
    options = {"eval_fraction": 0.0, **options}
    return build_dataset(kind, tokenizer, DataOptions(list(paths), str(tmp_path / "arrow"), 128, **options))


def test_ties_are_counted_as_dropped_not_as_bad(tokenizer, tmp_path):
    rows = [WEBGPT, *[WEBGPT | {"score_0": 0, "score_1": 0}] * 30]
    path = write_lines(tmp_path / "webgpt.jsonl", rows)
    splits = build("preference", tokenizer, tmp_path, f"openai/webgpt_comparisons={path}", max_bad_rows=0)
    assert len(splits.train) == 1 and splits.report.sources[0].dropped == {"no answer is preferred": 30}


def test_named_columns_are_used_in_the_rows_that_have_them(tokenizer, tmp_path):
    renamed = write_lines(tmp_path / "a.jsonl", [{"question": "add 1", "reply": "it is 2", "prompt": "not me"}])
    standard = write_lines(tmp_path / "b.jsonl", [{"prompt": "add 2", "response": "it is 3"}])
    columns = {"prompt": "question", "response": "reply"}
    splits = build("sft", tokenizer, tmp_path, renamed, standard, columns=columns)
    texts = [tokenizer.decode(ids) for ids in splits.train["input_ids"]]
    assert texts == [f"\n\nHuman: add {n}\n\nAssistant: it is {n + 1}</s>" for n in (1, 2)]
    with pytest.raises(ValueError, match="no row has the columns of this step"):
        build("sft", tokenizer, tmp_path, renamed)


def test_a_named_column_that_is_in_no_row_is_an_error(tokenizer, tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl", [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b", "m": 1}]
    )
    build("sft", tokenizer, tmp_path, path, columns={"margin": "m"})  # some rows have it
    with pytest.raises(ValueError, match="--prompt_column q, --text_column t: in no row .* prompt, response, m"):
        build("sft", tokenizer, tmp_path, path, columns={"prompt": "q", "response": "response", "text": "t"})


def test_of_rows_with_equal_content_the_first_is_kept(tokenizer, tmp_path):
    rows = [{"prompt": "a", "response": str(i % 3), "id": i} for i in range(9)]
    rows.append({"messages": chat("a", "0"), "id": 10})  # the same conversation in another schema
    folder = tmp_path / "rows"
    write_lines(folder / "train.jsonl", rows)
    write_lines(folder / "test.jsonl", [{"prompt": "a", "response": str(i)} for i in (2, 3)])  # 2 is a train row
    assert len(build("sft", tokenizer, tmp_path, str(folder)).train) == 10
    splits = build("sft", tokenizer, tmp_path, str(folder), drop_duplicates=True)
    assert [tokenizer.decode(ids)[-5:-4] for ids in splits.train["input_ids"]] == ["0", "1", "2"]
    assert [tokenizer.decode(ids)[-5:-4] for ids in splits.eval["input_ids"]] == ["3"]
    assert splits.report.sources[0].dropped == {"duplicate": 8} and "8 dropped (duplicate)" in splits.report.summary()
