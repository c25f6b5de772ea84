"""Evaluation: means are over responses and tokens, independent of batches, and deterministic for the same actor.

Two ranks are compared with one in test_rlhf_engine.py.
"""

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from rlhf_models import QUESTIONS, eval_rows, make_trainer, prompts_of, save_models

from dschat.rewards.weighted_sum import ResponseBatch, Scores
from dschat.rlhf.answer_metrics import answer_metrics
from dschat.rlhf.evaluation import evaluate
from dschat.rlhf.experience import Experience
from dschat.rlhf.rollouts.metrics import experience_metrics, experience_sums
from dschat.rlhf.rollouts.result import RolloutResult, Timings, sample_records
from dschat.rlhf.rollouts.score_shaping import flat_groups

pytestmark = pytest.mark.usefixtures("single_rank_group")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def lengths(prompts, responses, rows):
    return [float(len(response)) for response in responses]


@pytest.fixture(scope="module")
def trainer(folder):
    """A trainer whose actor differs from the reference model."""
    trainer = make_trainer(folder, judge=lengths, max_answer_seq_len=12)
    for _ in range(3):
        trainer.train_rlhf(trainer.generate_experience(prompts_of(trainer)))
    return trainer


def test_metrics_are_means_over_responses_and_tokens(trainer):
    parts, sums, samples = [], [], []
    for ids in (range(3), range(3, 8)):  # batches of 3 and 5: a mean of their means would be another number
        prompts = prompts_of(trainer, [QUESTIONS[i] for i in ids])
        result = trainer.rollout(prompts, sample_ids=ids)
        parts.append(result.experience)
        sums.append(experience_sums(result, judged=True))
        samples += result.samples
    metrics = experience_metrics(sums)
    counts = [int(part.response_mask[row].sum()) for part in parts for row in range(len(part))]

    def per_response(name: str) -> list[float]:
        return [float(getattr(part, name)[row].sum()) for part in parts for row in range(len(part))]

    def per_token(values) -> float:
        return sum(float(v[part.response_mask].sum()) for v, part in zip(values, parts, strict=True)) / sum(counts)

    expected = {name: sum(per_response(source)) / 8 for name, source in
                (("score", "scores"), ("reward", "rewards"), ("kl", "kl"), ("ended_by_eos", "ended"))}  # fmt: skip
    expected["response_length"] = sum(counts) / 8
    expected |= {"responses": 8, "reward_reward": expected["score"]}
    expected["judge"] = sum(len(sample["response"]) for sample in samples) / 8
    samples[0]["judge"] = None  # None from the judge: the mean is over the others
    whole = RolloutResult(Experience.concatenate(parts), samples, Timings())
    partly = experience_metrics([experience_sums(whole, judged=True)])
    assert partly["judge_missing"] == 1
    assert partly["judge"] == pytest.approx(sum(len(sample["response"]) for sample in samples[1:]) / 7)
    expected["entropy"] = per_token([part.entropy for part in parts])
    deltas = [part.old_logprobs - part.rollout_logprobs for part in parts]
    expected["rollout_logprob_mismatch_mean"] = per_token([delta.abs() for delta in deltas])
    expected["rollout_logprob_mismatch_max"] = max(float(delta.abs().max()) for delta in deltas)
    expected["rollout_ratio"] = per_token([delta.exp() for delta in deltas])
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert abs(metrics["kl"]) > 1e-3 and 0 < metrics["ended_by_eos"] < 1 and len(set(counts)) > 1
    assert 0 < metrics["rollout_logprob_mismatch_mean"] < metrics["rollout_logprob_mismatch_max"] < 1e-4


def test_with_the_decoders_log_probs_no_mismatch_is_logged_and_entropy_is_estimated(folder):
    trainers = [make_trainer(folder, old_logprobs=which) for which in ("recompute", "rollout")]
    rows = eval_rows(trainers[0], QUESTIONS)
    (recomputed, _), (decoders, _) = (evaluate(trainer, rows, batch_size=8, max_batches=0) for trainer in trainers)
    mismatch = {name for name in recomputed if name.startswith("rollout_")}
    assert len(mismatch) == 3 and recomputed.keys() - decoders.keys() == mismatch
    assert not decoders.keys() - recomputed.keys()
    same = recomputed.keys() - mismatch - {"entropy"}
    assert {name: decoders[name] for name in same} == pytest.approx({name: recomputed[name] for name in same}, abs=1e-5)
    # −log q has the entropy as its mean and about 1 nat of deviation: about 0.2 in the mean of these 30 tokens.
    assert decoders["entropy"] == pytest.approx(recomputed["entropy"], abs=0.6) and decoders["entropy"] > 1


def test_rows_of_weight_0_do_not_change_the_metrics(trainer):
    sums = [experience_sums(trainer.rollout(prompts_of(trainer, QUESTIONS[:3])))]
    alone = experience_metrics(sums)
    idle = trainer.rollout(prompts_of(trainer, QUESTIONS[3:]))
    sums.append(experience_sums(idle, weight=0.0))
    assert experience_metrics(sums) == alone


def test_every_row_is_evaluated_once_at_any_batch_size(trainer):
    rows = eval_rows(trainer, QUESTIONS)
    by_size = {size: evaluate(trainer, rows, batch_size=size, max_batches=0) for size in (8, 3)}
    for _, samples in by_size.values():
        assert [sample["prompt"] for sample in samples] == QUESTIONS
    (metrics, samples), (others, other_samples) = by_size.values()
    assert [sample["response"] for sample in samples] == [sample["response"] for sample in other_samples]
    # A maximum of rounding errors, which depend on the batch.
    largest = [each.pop("rollout_logprob_mismatch_max") for each in (metrics, others)]
    assert metrics == pytest.approx(others, rel=1e-4, abs=1e-6) and max(largest) < 1e-4


def test_duplicated_rows_get_different_responses(trainer):
    _, samples = evaluate(trainer, eval_rows(trainer, QUESTIONS[:1] * 4), batch_size=2, max_batches=0)
    assert len({sample["response"] for sample in samples}) == 4


def test_evaluation_is_repeatable_and_depends_on_the_actor(folder):
    trainer = make_trainer(folder)
    rows = eval_rows(trainer, QUESTIONS[:5])
    first = evaluate(trainer, rows, batch_size=2, max_batches=0)
    state = torch.get_rng_state()
    assert evaluate(trainer, rows, batch_size=2, max_batches=0) == first
    assert torch.equal(torch.get_rng_state(), state), "an evaluation does not change the random state of training"
    for _ in range(4):
        trainer.train_rlhf(trainer.generate_experience(prompts_of(trainer)))
    assert evaluate(trainer, rows, batch_size=2, max_batches=0) != first


def test_max_batches_limits_the_evaluation_and_no_rows_give_no_metrics(trainer):
    rows = eval_rows(trainer, QUESTIONS)
    _, samples = evaluate(trainer, rows, batch_size=3, max_batches=2)
    assert [sample["prompt"] for sample in samples] == QUESTIONS[:6]
    assert evaluate(trainer, rows.select([]), batch_size=3, max_batches=0) == ({}, [])


def test_an_evaluation_changes_nothing_on_the_trainer(trainer):
    before = dict(vars(trainer))
    evaluate(trainer, eval_rows(trainer, QUESTIONS[:2]), batch_size=2, max_batches=0)
    assert vars(trainer) == before


# --- several responses to a prompt -----------------------------------------------------------------------------------


def brute_force_metrics(groups: list[list[tuple[float, str]]], success: float) -> dict[str, float]:
    """mean@n, pass@k and maj@n of (score, answer), by enumerating every subset."""
    n = len(groups[0])
    metrics = {f"mean@{n}": sum(score >= success for group in groups for score, _ in group) / (n * len(groups))}
    for k in {2, 4, 8, n} & set(range(2, n + 1)):
        chances = [
            [any(score >= success for score, _ in subset) for subset in itertools.combinations(group, k)]
            for group in groups
        ]
        metrics[f"pass@{k}"] = sum(sum(each) / len(each) for each in chances) / len(groups)
    hits = 0
    for group in groups:
        answers = [answer for _, answer in group if answer]
        votes = max((answers.count(answer) for answer in answers), default=0)
        first = next((score for score, answer in group if answer and answers.count(answer) == votes), -math.inf)
        hits += first >= success
    return metrics | {f"maj@{n}": hits / len(groups)}


@pytest.mark.parametrize("n", [2, 3, 4, 6, 9])
def test_answer_metrics_equal_brute_force(n):
    random.seed(n)
    groups = [
        [{"score": random.choice([0.0, 0.4, 1.0]), "response": random.choice(["is 3", "3", "so 4", "none", "5.0"])}
         for _ in range(n)]
        for _ in range(12)
    ]  # fmt: skip
    value = {"is 3": "3", "3": "3", "so 4": "4", "none": "", "5.0": "5"}
    plain = [[(sample["score"], value[sample["response"]]) for sample in group] for group in groups]
    for success in (1.0, 0.4):
        actual = answer_metrics(groups, success=success, extraction="last_number")
        assert actual == pytest.approx(brute_force_metrics(plain, success))
    assert 0 < actual[f"maj@{n}"] < 1


def test_responses_to_one_prompt_differ_and_answer_metrics_follow_from_the_samples(folder):
    trainer = make_trainer(folder, max_answer_seq_len=12)
    rows = eval_rows(trainer, QUESTIONS[:5])
    metrics, samples = evaluate(
        trainer, rows, batch_size=2, max_batches=0, num_samples=3, success_score=0.2, answer="text"
    )
    assert [sample["prompt"] for sample in samples] == [question for question in QUESTIONS[:5] for _ in range(3)]
    groups = [samples[first : first + 3] for first in range(0, 15, 3)]
    assert any(len({sample["response"] for sample in group}) == 3 for group in groups)
    plain = [[(sample["score"], " ".join(sample["response"].split())) for sample in group] for group in groups]
    expected = brute_force_metrics(plain, 0.2)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected) and 0 < expected["mean@3"] < 1
    assert metrics["responses"] == 15
    _, others = evaluate(trainer, rows, batch_size=5, max_batches=0, num_samples=3, answer="text")
    assert [sample["response"] for sample in others] == [sample["response"] for sample in samples]


def test_evaluation_reports_raw_scores_also_with_normalize_rewards(folder):
    plain, normalising = (make_trainer(folder, normalize_rewards=each) for each in (False, True))
    rows = eval_rows(plain, QUESTIONS)
    expected, _ = evaluate(plain, rows, batch_size=8, max_batches=0)
    before, _ = evaluate(normalising, rows, batch_size=8, max_batches=0)
    experience = normalising.generate_experience(prompts_of(normalising))
    after, samples = evaluate(normalising, rows, batch_size=8, max_batches=0)
    assert before == after == expected
    assert sum(sample["score"] for sample in samples) / 8 == pytest.approx(expected["score"])
    assert abs(float(experience.scores.mean())) < 1e-5 < abs(expected["score"]), "only training scores are normalised"


@pytest.mark.parametrize("name", ["well_known", "word_count", "count:length", "known"])
def test_a_reward_source_may_have_any_name(trainer, name):
    result = trainer.rollout(prompts_of(trainer, QUESTIONS[:3]))
    for sample, score in zip(result.samples, (1.0, None, 4.0), strict=True):
        sample["rewards"] = {name: score}
    metrics = experience_metrics([experience_sums(result)])
    rewards = {key: value for key, value in metrics.items() if key.startswith("reward_")}
    assert rewards == {f"reward_{name}": 2.5, f"reward_{name}_missing": 1.0}


def test_a_response_without_a_score_affects_neither_mean_scores_nor_flat_groups(trainer):
    result = trainer.rollout(prompts_of(trainer, QUESTIONS[:6]))
    part = result.experience
    part.scores = torch.tensor([1.0, 1.0, 0.0, 2.0, 3.0, 0.0])
    part.has_score = torch.tensor([True, True, False, True, True, False])
    metrics = experience_metrics([experience_sums(result, group_size=3)])
    assert metrics["score"] == 7 / 4 and metrics["flat_groups"] == 1 / 2 and metrics["scored"] == 4 / 6
    assert metrics["reward"] == pytest.approx(float(part.rewards[part.has_score].sum()) / 4)
    flat = flat_groups(part.scores, torch.tensor([False] * 3 + [False, True, False]), 3)
    assert flat.tolist() == [True, True], "a group with one score or none is flat"
    below = torch.tensor([-1.0, -1.0, 0.0, -2.0, -1.0, 0.0])
    assert flat_groups(below, part.has_score, 3).tolist() == [True, False]


def test_means_without_any_score_are_no_number_rather_than_0(trainer):
    result = trainer.rollout(prompts_of(trainer, QUESTIONS[:6]))
    result.experience.has_score = torch.zeros(6, dtype=torch.bool)
    for sample in result.samples:
        sample["judge"] = None
    metrics = experience_metrics([experience_sums(result, judged=True)])
    assert all(math.isnan(metrics[name]) for name in ("score", "reward", "judge"))
    assert metrics["scored"] == 0 and metrics["judge_missing"] == 6


def test_samples_without_a_score_have_none_and_their_groups_are_left_out():
    scores = Scores(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([True, False, True, True]), {})
    chats = [[{"role": "user", "content": "2 plus 3?"}]] * 4
    batch = ResponseBatch(chats, ["is 5", "is 6", "is 4", "is 5"], [[1]] * 4, [{}] * 4, [True] * 4, 8)
    records = sample_records(batch, scores, row_index=range(4), judge_scores=[None] * 4)
    assert [record["score"] for record in records] == [1.0, None, 0.0, 1.0]
    metrics = answer_metrics([records[:2], records[2:]], success=1.0, extraction="last_number")
    assert metrics == {"mean@2": 0.5, "pass@2": 1.0, "maj@2": 0.0}
    empty = answer_metrics([records[:2]], success=1.0, extraction="last_number")
    assert all(math.isnan(value) for value in empty.values())
