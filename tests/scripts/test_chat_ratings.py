"""Ratings of chat.py --web: the pairs that they become, which step 2 reads and trains on."""

# ruff: noqa: F811  (imported fixtures are arguments of the tests)

import json

import pytest
from chat_server import (  # noqa: F401  (fixtures)
    QUESTION,
    materials,
    models,
    reply,
    server,
)
from chat_web.ratings import RatingsFile
from programs import MAINS
from step_materials import flags

from dschat.data.datasets import build_dataset
from dschat.data.options import DataOptions
from dschat.models.tokenizer import load_tokenizer

ANSWERS = [{"model": 0, "content": " It is 7.", "ended": True}, {"model": 1, "content": "8", "ended": False}]


def rate(server, choice, answers=ANSWERS, **fields):
    return reply(server, "/rating", {"choice": choice, "answers": answers, "messages": QUESTION} | fields)


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_better_answer_is_chosen_and_an_answer_that_was_cut_has_no_end(server, models, tmp_path):
    for choice in ("first", "second"):
        assert rate(server, choice) == (200, {"saved": str(tmp_path / "ratings.jsonl")})
    assert rate(server, "first", settings={"system": "Be brief."})[0] == 200
    first, second, with_system = rows_of(tmp_path / "ratings.jsonl")
    good, bad = ([{"role": "assistant", "content": answer["content"]}] for answer in ANSWERS)
    assert (first["chosen"], first["rejected"]) == (good, bad)
    assert (first["chosen_ended"], first["rejected_ended"]) == (True, False)
    assert (second["chosen"], second["rejected"], second["chosen_ended"]) == (bad, good, False)
    assert first["chosen_model"] == models[0].name and first["prompt"] == QUESTION
    assert with_system["prompt"] == [{"role": "system", "content": "Be brief."}, *QUESTION]


def test_a_tie_is_kept_apart_from_the_pairs(server, tmp_path):
    assert rate(server, "tie") == (200, {"saved": str(tmp_path / "ratings.ties.jsonl")})
    (row,) = rows_of(tmp_path / "ratings.ties.jsonl")
    assert [answer["content"] for answer in row["answers"]] == [" It is 7.", "8"]
    assert not (tmp_path / "ratings.jsonl").exists()


@pytest.mark.parametrize(("fields", "reason"), [
    ({"choice": "third"}, "choice 'third': must be one of first, second, tie"),
    ({"answers": ANSWERS[:1]}, "answers must be a list of two"),
    ({"answers": [ANSWERS[0], ANSWERS[1] | {"content": " "}]}, "an answer is empty"),
    ({"answers": [ANSWERS[0], ANSWERS[0] | {"content": "It is 7. "}]}, "both answers are the same text"),
    ({"answers": [ANSWERS[0], ANSWERS[1] | {"ended": None}]}, "by ended whether it is complete"),
    ({"answers": [ANSWERS[0], ANSWERS[1] | {"content": "\ud800"}]}, "Unicode"),
])  # fmt: skip
def test_what_step_2_could_not_read_is_not_saved(server, tmp_path, fields, reason):
    status, body = reply(server, "/rating", {"choice": "first", "answers": ANSWERS, "messages": QUESTION} | fields)
    assert status == 400 and reason in body["error"] and not list(tmp_path.iterdir())


def test_a_rating_that_cannot_be_written_names_the_file(server, tmp_path):
    (tmp_path / "ratings.jsonl").mkdir()
    status, body = rate(server, "first")
    assert status == 507 and f"{tmp_path / 'ratings.jsonl'}: Is a directory" in body["error"]


def test_ratings_are_appended_after_a_line_that_was_cut_off(server, tmp_path):
    (tmp_path / "ratings.jsonl").write_text('{"prompt": "cut o')
    rate(server, "first")
    assert [line[:9] for line in (tmp_path / "ratings.jsonl").read_text().splitlines()] == ['{"prompt"'] * 2


@pytest.mark.parametrize("content", ['{"messages": []}\n', "text\n", "[]\n", '{"prompt": "x", "chosen": "a"}\n'])
def test_a_file_of_something_else_is_not_appended_to(tmp_path, content):
    (tmp_path / "other.jsonl").write_text(content)
    with pytest.raises(ValueError, match="its first line is no preference pair"):
        RatingsFile(tmp_path / "other.jsonl")


def test_ratings_of_pairs_from_make_preferences_can_be_continued(tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "x", "chosen": "a", "rejected": "b", "chosen_ended": true}\n')
    assert RatingsFile(tmp_path / "pairs.jsonl").ties.name == "pairs.ties.jsonl"


TRICKY = "Human: a\n\nAssistant: b\n\nHuman: <|im_end|></s> \u2028 x"


@pytest.fixture
def rated(server, tmp_path):
    """A file of twelve ratings; the answers of the first are what step 2 could take for something else."""
    history = [{"role": "user", "content": TRICKY}, {"role": "assistant", "content": TRICKY}, *QUESTION]
    rate(server, "second", [ANSWERS[0], ANSWERS[1] | {"content": TRICKY}], messages=history)
    for number in range(11):
        rate(server, "first", [ANSWERS[0] | {"content": f"It is {number}."}, ANSWERS[1]], messages=QUESTION)
    return tmp_path / "ratings.jsonl"


def test_step_2_encodes_every_rating_as_the_conversation_that_was_rated(rated, materials, tmp_path):
    tokenizer = load_tokenizer(str(materials / "actor"))
    options = DataOptions(data_path=[str(rated)], data_split="0,1,0", eval_fraction=0.0, max_tokens=512,
                          output_path=str(tmp_path / "arrow"), max_bad_rows=0)  # fmt: skip
    splits = build_dataset("preference", tokenizer, options)
    assert len(splits.train) == 12
    longest = max(splits.train, key=lambda row: row["length"])
    texts = [tokenizer.decode(ids) for ids in longest.values() if isinstance(ids, list) and ids and len(ids) > 4]
    assert any(text.count("Human: a") == 2 for text in texts), "both the earlier answer and the message"


@pytest.mark.parametrize("step", ["reward", "dpo"])
def test_step_2_trains_on_the_ratings(rated, materials, programs, tmp_path, step):
    argv = flags(step, materials, tmp_path / step, data_path=rated, max_steps=1, data_output_path=tmp_path / "arrow",
                 max_seq_len=120, max_bad_rows=0)  # fmt: skip
    programs.run(MAINS[step], argv, log=tmp_path / "log.txt")
    metrics = [json.loads(line) for line in (tmp_path / step / "metrics.jsonl").read_text().splitlines()]
    assert any(row["phase"] == "train" and row["step"] == 1 for row in metrics)
