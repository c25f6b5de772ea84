"""Samples of the report: before and after, best and worst, paired changes, selection over time."""

import math
import sys

from repository import SCRIPTS
from run_files import sample

sys.path.insert(0, str(SCRIPTS))

import report_samples  # noqa: E402
from report_samples import abridged, before_and_after, best_and_worst, evenly, over_time, paired_change  # noqa: E402


def test_before_and_after_are_the_first_and_last_response_of_the_same_prompt():
    samples = [
        sample(0, "p", "first"), sample(0, "p", "another at the first step"), sample(5, "p", "middle"),
        sample(9, "p", "last"), sample(9, "p", "another at the last step"), sample(9, "q", "once"),
        sample(1, "t", "from training", phase="train"),
    ]  # fmt: skip
    pairs = before_and_after(samples, limit=10)
    assert [(a["response"], b and b["response"]) for a, b in pairs] == [("first", "last"), ("once", None)]
    assert before_and_after(samples, limit=1)[0][0]["response"] == "first"


def test_training_samples_are_shown_if_there_are_no_evaluation_samples():
    samples = [sample(1, "p", "a", phase="train"), sample(2, "p", "b", phase="train")]
    assert [(a["response"], b["response"]) for a, b in before_and_after(samples, limit=5)] == [("a", "b")]


def test_best_and_worst_are_of_the_last_evaluation_and_never_the_same_sample():
    early = [sample(0, "p", "early", score=99.0)]
    last = [sample(5, "p", str(score), score=score) for score in (2.0, -1.0, 7.0, 0.0, 5.0)]
    training = [sample(9, "p", "train", phase="train", score=50.0)]
    unscored = [sample(5, "p", "none", score=None)]
    best, worst = best_and_worst(early + last + training + unscored)
    assert [s["score"] for s in best] == [7.0, 5.0] and [s["score"] for s in worst] == [-1.0, 0.0]
    best, worst = best_and_worst(last * 2, count=3)
    assert [s["score"] for s in best] == [7.0, 7.0, 5.0] and [s["score"] for s in worst] == [-1.0, -1.0, 0.0]


def test_best_and_worst_of_training_if_no_evaluation_has_scores():
    samples = [sample(1, "p", "a", phase="train", score=1.0), sample(1, "p", "b", phase="train", score=2.0),
               sample(1, "p", "e", score=None)]  # fmt: skip
    best, worst = best_and_worst(samples)
    assert (best[0]["response"], worst[0]["response"]) == ("b", "a")
    assert best_and_worst([]) == ([], [])


def test_a_change_is_paired_by_prompt():
    # Changes 1, 2, 3 of p, q, r: mean 2, standard deviation 1. The prompt s has no second evaluation.
    before, after = {"p": 0.0, "q": 10.0, "r": -5.0, "s": 7.0}, {"p": 1.0, "q": 12.0, "r": -2.0}
    samples = [sample(0, p, "x", score=v) for p, v in before.items()] + [sample(3, "p", "x", score=100.0)]
    samples += [sample(8, p, "x", score=v) for p, v in after.items()]
    mean, error, prompts = paired_change(samples, "score")
    assert (mean, prompts) == (2.0, 3) and math.isclose(error, 1 / math.sqrt(3))


def test_several_responses_to_a_prompt_count_once():
    samples = [sample(0, p, "x", score=v) for p, v in (("p", 0.0), ("p", 2.0), ("q", 0.0))]
    samples += [sample(1, p, "x", score=v) for p, v in (("p", 3.0), ("p", 5.0), ("q", 1.0))]
    assert paired_change(samples, "score")[0] == 2.0  # (4 − 1 + 1 − 0) / 2


def test_there_is_no_change_without_two_evaluations_of_two_prompts():
    assert paired_change([sample(0, "p", "x"), sample(0, "q", "x")], "score") is None
    assert paired_change([sample(0, "p", "x"), sample(1, "p", "x"), sample(1, "q", "x")], "score") is None
    assert paired_change([sample(s, p, "x", phase="train") for s in (0, 1) for p in "pq"], "score") is None


def test_an_even_selection_keeps_the_ends():
    assert evenly(range(10), 4) == [0, 3, 6, 9]
    assert evenly([1, 2], 5) == [1, 2] and evenly([1, 2, 3], 1) == [1] and evenly([1, 2], 0) == []


def test_the_list_has_the_same_prompts_of_each_evaluation_and_all_scores_of_training_steps():
    samples = [sample(step, f"p{i}", "r") for step in (0, 5) for i in range(4)]
    samples += [sample(1, "t", "r", phase="train", score=score) for score in (5.0, 1.0, 4.0, 2.0, 3.0)]
    listed = over_time(samples, per_step=3)
    assert [(s["step"], s["prompt"]) for s in listed[:6]] == [(step, f"p{i}") for step in (0, 5) for i in range(3)]
    assert [s["scores"]["score"] for s in listed[6:]] == [1.0, 3.0, 5.0]


def test_a_long_run_lists_the_first_and_the_last_step(monkeypatch):
    monkeypatch.setattr(report_samples, "MAX_STEPS", 3)
    listed = over_time([sample(step, "p", "r", phase="train") for step in range(1, 101)], per_step=5)
    assert [s["step"] for s in listed] == [1, 50, 100] or [s["step"] for s in listed] == [1, 51, 100]


def test_a_long_text_keeps_its_start_and_its_end():
    text = "a" * 3000 + "answer: 42"
    short = abridged(text)
    assert len(short) < 2500 and short.startswith("aaa") and short.endswith("answer: 42") and "610 characters" in short
    assert abridged("short") == "short"
