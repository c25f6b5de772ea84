"""Preference pairs built from scored responses."""

import json
from random import Random

from dschat.data.datasets import DataOptions, build_dataset
from dschat.preference.pairing import pairs_of_batch, preference_pairs


def pairs(responses, scores, max_pairs=99, seed=0):
    ended = [True] * len(responses)
    built = preference_pairs(responses, scores, ended=ended, max_pairs=max_pairs, generator=Random(seed))
    return sorted((p["chosen"], p["rejected"], p["chosen_score"], p["rejected_score"]) for p in built)


def test_the_better_response_is_chosen_and_ties_make_no_pair():
    assert pairs(["a", "b", "c"], [1, 3, 1]) == [("b", "a", 3.0, 1.0), ("b", "c", 3.0, 1.0)]
    assert pairs(["a", "b"], [-2.0, -5.0]) == [("a", "b", -2.0, -5.0)]
    assert pairs(["a", "b"], [1.0, 1.0]) == []


def test_equal_texts_and_empty_responses_make_no_pair():
    assert pairs(["a", "a ", "\n"], [1, 2, 3]) == []


def test_max_pairs_are_drawn_by_the_seed_without_repeats():
    responses, scores = list("abcdef"), [1, 2, 3, 4, 5, 6]
    all_pairs = pairs(responses, scores)
    assert len(all_pairs) == 15
    drawn = [pairs(responses, scores, max_pairs=4, seed=seed) for seed in range(20)]
    assert all(len(set(chosen)) == 4 and set(chosen) <= set(all_pairs) for chosen in drawn)
    assert drawn[0] == pairs(responses, scores, max_pairs=4, seed=0)
    assert set(sum(drawn, [])) == set(all_pairs), "every pair can be drawn"


def test_a_batch_pairs_responses_of_the_same_prompt_and_skips_unscored_ones():
    prompts = [[{"role": "user", "content": name}] for name in ("first", "second")]
    rows = pairs_of_batch(
        prompts, ["a", "b", "c", "d", "e", "f"], [1.0, 2.0, None, None, 5.0, 6.0],
        ended=[True, False, True, True, True, False], indices=[7, 3], max_pairs=9, seed=0,
    )  # fmt: skip
    assert [(index, row["prompt"], row["chosen"], row["rejected"]) for index, row in rows] == [
        (7, prompts[0], "b", "a"), (3, prompts[1], "f", "e"),
    ]  # fmt: skip
    assert [(row["chosen_ended"], row["rejected_ended"]) for _, row in rows] == [(False, True), (False, True)]


def test_step_2_appends_the_end_token_only_to_responses_that_ended(tmp_path, tiny_tokenizer):
    (pair,) = preference_pairs(
        ["the cat", "the dog"], [1, 2], ended=[False, True], max_pairs=1, generator=Random(0)
    )  # fmt: skip
    assert (pair["chosen_ended"], pair["rejected_ended"]) == (True, False)
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "the mat", **pair}) + "\n")
    end, options = tiny_tokenizer.eos_token_id, DataOptions([str(file)], str(tmp_path), 64, eval_fraction=0.0, phase=2)
    row = build_dataset("preference", tiny_tokenizer, options).train[0]
    start = row["prompt_length"]
    assert tiny_tokenizer.decode(row["chosen_ids"][start:]) == "the dog<|im_end|>" and row["chosen_ids"][-1] == end
    assert tiny_tokenizer.decode(row["rejected_ids"][start:]) == "the cat"
    assert row["length"] == len(row["chosen_ids"]) + len(row["rejected_ids"])
    unpaired = build_dataset("unpaired", tiny_tokenizer, options).train
    assert [ids[-1] == end for ids in unpaired["input_ids"]] == [True, False]
