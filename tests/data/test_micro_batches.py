"""Micro-batches of a step: bounded forward passes, equal results, and ranks in lockstep."""

import random
from pathlib import Path

import pytest
import torch
from rlhf_models import QUESTIONS, make_trainer, prompts_of, save_models
from torch import nn

from dschat import arguments
from dschat.data import micro_batches
from dschat.data.micro_batches import MicroBatchLimit, StepRows, forward_in_micro_batches, limit_of
from dschat.generation import SamplingParams
from dschat.models.backbone import Packing
from dschat.models.packed.rows import prompt_lengths_of
from dschat.models.tokenizer import load_tokenizer
from dschat.preference import response_scoring
from dschat.rlhf.rollouts.result import Timings

pytestmark = pytest.mark.usefixtures("single_rank_group")


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"), request.param, dropout=0.5)


def record_forward_passes(trainer) -> dict[str, list[tuple[int, bool]]]:
    """Tokens of each forward pass of each model, and whether any of its modules was training.

    A padded batch counts its rows times the longest: the columns that are padding in all of its rows do not count.
    """
    engine, passes = trainer.engine, {}
    models = {"actor": engine.policy, "ref": engine.ref, "critic": engine.critic, "reward": engine.reward}
    for name, model in models.items():
        calls = passes[name] = []

        def record(module, args, kwargs, calls=calls):
            mask = kwargs["attention_mask"]
            calls.append((len(mask) * int(mask.sum(dim=1).max()), any(part.training for part in module.modules())))

        if model is not None:
            model.module.model.base_model.register_forward_pre_hook(record, with_kwargs=True)
    return passes


def distinct_tokens(experience) -> int:
    """Tokens of an experience with each prompt once."""
    prompts = {
        tuple(ids[:-columns][mask[:-columns]].tolist())
        for columns in [experience.response_mask.shape[1]]
        for ids, mask in zip(experience.sequences, experience.attention_mask, strict=True)
    }
    return sum(map(len, prompts)) + int(experience.response_mask.sum())


@pytest.fixture(autouse=True)
def rows_split_however_short(monkeypatch):
    """All rows of these tests together are shorter than the default of a pass without gradients."""
    monkeypatch.setattr(micro_batches, "FORWARD_TOKENS", 0)


WAYS = {  # devices' flags, and the budget: 0 stands for rows × longest
    "packed": {}, "all prompts": {"share_prompts": False}, "padded": {"remove_padding": False},
}  # fmt: skip


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("algorithm", ["ppo", "remax"])
def test_an_experience_does_not_depend_on_the_micro_batch_and_no_forward_pass_exceeds_it(folder, algorithm, kernels):
    """The reference is a single pass, over a rectangle by torch's kernels, over a packed row by those of the CPU: each
    rounds in its own way. Whole steps by both are compared in test_step_equality."""
    settings = {
        "algorithm": algorithm, "num_samples_per_prompt": 2, "gradient_accumulation_steps": 8, "kernels": kernels
    }  # fmt: skip
    if algorithm == "remax":
        settings |= {"kl_in": "reward", "kl_coef": 0.1}
    experiences = {}
    cases = [(way, budget) for way in WAYS for budget in (0, 120)] if algorithm == "ppo" else [("packed", 120)]
    reference = ("padded" if kernels == "torch" else "packed", 10_000)
    cases.append(reference)
    for way, budget in cases:
        trainer = make_trainer(
            folder, **settings, **WAYS[way], per_device_training_batch_size=3, max_tokens_per_micro_batch=budget
        )
        trainer.engine.policy.train()  # as an update leaves it
        passes = record_forward_passes(trainer)
        experience = experiences[way, budget] = trainer.generate_experience(prompts_of(trainer))
        assert len(experience) == 16
        longest = int(experience.attention_mask.sum(dim=1).max())
        for name, calls in passes.items():
            if algorithm == "remax" and name == "reward":
                continue  # scores the greedy baselines too
            tokens = [count for count, _ in calls]
            assert max(tokens, default=0) <= (budget or 3 * longest), (way, budget, name)
            assert not any(training for _, training in calls), f"{name} is in training mode while it scores"
            if way == "all prompts" and tokens:
                assert sum(tokens) == experience.attention_mask.sum(), name
            elif way == "packed" and tokens and budget:  # no group is too large for the budget
                assert sum(tokens) == distinct_tokens(experience), name
    expected = experiences.pop(reference)
    for case, actual in experiences.items():
        assert torch.equal(actual.sequences, expected.sequences)
        for name, tensor in expected.tensors().items():
            mask = expected.response_mask if name == "values" else slice(None)  # values at padding are undefined
            torch.testing.assert_close(
                getattr(actual, name)[mask], tensor[mask], atol=2e-6, rtol=1e-5,
                msg=lambda m, n=name, c=case: f"{c}, {n}: {m}",
            )  # fmt: skip


def test_greedy_baselines_and_evaluations_are_split_too(folder):
    trainer = make_trainer(folder, max_tokens_per_micro_batch=45, gradient_accumulation_steps=8)
    passes = record_forward_passes(trainer)
    trainer.greedy_scores(prompts_of(trainer), Timings())
    assert len(passes["reward"]) > 1
    trainer.rollout_and_score(prompts_of(trainer, QUESTIONS[:4]), iteration=1)
    critic_calls = passes.pop("critic")
    assert all(len(calls) > 1 for calls in passes.values()) and not critic_calls
    assert max(tokens for calls in passes.values() for tokens, _ in calls) <= 45


def test_a_reward_model_of_make_preferences_has_micro_batches_of_the_generation_batch_size(folder, monkeypatch):
    settings = arguments.PairSettings(
        sampling=arguments.PairArguments(
            model_name_or_path=str(folder / "actor"), per_device_generation_batch_size=3, num_samples_per_prompt=2
        ),
        rewards=arguments.RewardArguments(reward=[str(folder / "reward")]),
        devices=arguments.PairDeviceArguments(dtype="fp32"),
    )  # fmt: skip
    built = []
    usual = response_scoring.RewardModel
    monkeypatch.setattr(response_scoring, "RewardModel", lambda *a, **k: built.append(usual(*a, **k)) or built[-1])
    score = response_scoring.score_function(settings, load_tokenizer(folder / "actor"))
    trainer = make_trainer(folder)
    rollout = trainer.generate(
        prompts_of(trainer, QUESTIONS[:7]), SamplingParams(temperature=0.7), iteration=0, sample_ids=None
    )
    answers = trainer.response_batch(rollout, prompts_of(trainer, QUESTIONS[:7]))
    rows = []
    built[0].engine.module.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    scores = score(rollout, answers)
    lengths = rollout.attention_mask.sum(dim=1)
    assert len(rows) > 1 and sum(rows) == lengths.sum() and max(rows) <= 3 * lengths.max()
    built[0].limit = MicroBatchLimit(rows=100)
    assert scores == pytest.approx(score(rollout, answers), abs=1e-6)


class RecordingModel(nn.Module):
    """Returns twice its ids and their squares; records the first id of each row of each forward pass."""

    def __init__(self, *, partitioned: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.rows: list[list[int]] = []
        if partitioned:
            self.weight.ds_id = 0

    def forward(self, input_ids, attention_mask, factor=1, **_):
        assert input_ids.shape == attention_mask.shape
        self.rows.append(input_ids[:, 0].tolist())
        return 2.0 * input_ids * factor * self.weight, input_ids.square()


@pytest.mark.parametrize(("other_passes", "repeated"), [(3, 0), (5, 2)])
def test_a_rank_with_fewer_rows_runs_as_many_forward_passes_and_returns_only_its_own_rows(
    monkeypatch, other_passes, repeated
):
    """5 rows of 2 tokens, 4 tokens at a time, take 3 passes; another rank takes `other_passes`."""
    agreed = []

    def max_over_ranks(passes):
        assert not model.rows, "ranks must agree on the number of passes before the first one"
        agreed.append(int(passes))
        return torch.tensor(max(int(passes), other_passes))

    monkeypatch.setattr(micro_batches, "max_over_ranks", max_over_ranks)
    ids = torch.arange(10).view(5, 2)
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
    for partitioned in (True, False):
        model = RecordingModel(partitioned=partitioned)
        double, square = forward_in_micro_batches(model, rows, limit=MicroBatchLimit(rows=2), factor=3)
        assert torch.equal(double, 6.0 * ids) and torch.equal(square, ids.square())
        own, others = model.rows[:3], model.rows[3:]
        assert sorted(map(len, own)) == [1, 2, 2] and sorted(sum(own, [])) == [0, 2, 4, 6, 8]
        assert others == [[0]] * (repeated if partitioned else 0)
    assert agreed == [3], "without partitioned weights there is no collective"
    model = RecordingModel()
    forward_in_micro_batches(model, rows, limit=MicroBatchLimit(rows=9))
    assert model.rows == [[0, 2, 4, 6, 8]]


@pytest.mark.parametrize("seed", range(20))
def test_results_return_to_their_rows_whatever_the_lengths_and_the_budget(seed):
    trial = random.Random(seed)
    mask = torch.zeros(trial.randint(1, 12), 9, dtype=torch.bool)
    for row in mask:
        row[trial.randint(0, 4) : trial.randint(5, 9)] = True
    ids = torch.arange(mask.numel()).view_as(mask)
    limit = MicroBatchLimit(
        rows=trial.randint(1, 4), max_tokens=trial.choice([0, 10, 17]), share_prompts=trial.random() < 0.5,
        padded=trial.random() < 0.5, quadratic=trial.choice([0.0, 0.1]),
    )  # fmt: skip
    rows = {"input_ids": ids, "attention_mask": mask, "loss_mask": mask}
    double, square = forward_in_micro_batches(RecordingModel(), rows, limit=limit)
    assert torch.equal(double, 2.0 * ids) and torch.equal(square, ids.square())


def test_equal_prompts_count_once_if_they_are_known_and_shared():
    """Four rows of 6 tokens, prompts of 4 in two pairs: 8 tokens a pair, so a budget of 8 takes two passes."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 2, 3, 4, 5, 6], [1, 2, 3, 4, 8, 9], [7, 2, 3, 4, 8, 9]])
    mask, loss_mask = torch.ones_like(ids, dtype=torch.bool), torch.arange(6).expand_as(ids) >= 4
    by_length, unknown = {"prompt_lengths": torch.full((4,), 4)}, {}
    for known, shared, passes in [
        ({"loss_mask": loss_mask}, True, [[1, 1], [7, 7]]), (by_length, True, [[1, 1], [7, 7]]),
        (unknown, True, [[1], [1], [7], [7]]), (by_length, False, [[1], [1], [7], [7]]),
    ]:  # fmt: skip
        model = RecordingModel()
        limit = MicroBatchLimit(rows=1, max_tokens=8, share_prompts=shared)
        forward_in_micro_batches(model, {"input_ids": ids, "attention_mask": mask} | known, limit=limit)
        assert sorted(model.rows) == passes
    assert prompt_lengths_of(loss_mask, mask).tolist() == [4] * 4


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 40])
def test_every_rank_gets_as_many_micro_batches_and_together_they_hold_each_row_once(padded, max_tokens):
    trial = random.Random(max_tokens)
    limit = MicroBatchLimit(rows=2, max_tokens=max_tokens, padded=padded)
    for world_size in (1, 2, 3, 7):
        lengths = [trial.randint(1, 30) for _ in range(trial.randint(1, 25))]
        shares = [limit.rank_share(lengths, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert len({len(share) for share in shares}) == 1
        assert sorted(row for share in shares for part in share for row in part) == list(range(len(lengths)))
        budget = max_tokens or 2 * max(lengths)
        for part in (part for share in shares for part in share if len(part) > 1):
            tokens = len(part) * max(lengths[i] for i in part) if padded else sum(lengths[i] for i in part)
            assert tokens <= budget


def test_the_limit_follows_what_the_network_can_do(folder):
    engine = make_trainer(folder).engine
    network = engine.policy.module
    width = network.model.config.hidden_size
    assert engine.limit_of(engine.policy) == MicroBatchLimit(rows=4, share_prompts=True, quadratic=1 / (12 * width))
    for packing in (Packing(), Packing(remove_padding=True)):
        network.backbone.packing = packing
        limit = limit_of(network, rows=5, max_tokens=70)
        assert (limit.rows, limit.max_tokens, limit.share_prompts) == (5, 70, False)
        assert limit.padded == (not packing.remove_padding)
    assert limit.budget(30) == 70 and MicroBatchLimit(rows=5).budget(30) == 150
    assert limit.fewest(StepRows([50, 30, 30]), budget=70) == 2


def test_passes_without_gradients_read_more_tokens_unless_there_is_a_limit(monkeypatch):
    monkeypatch.setattr(micro_batches, "FORWARD_TOKENS", 400)
    assert MicroBatchLimit(rows=5).budget(30, gradients=False) == 400
    assert MicroBatchLimit(rows=50).budget(30, gradients=False) == 1500
    assert MicroBatchLimit(rows=5, max_tokens=70).budget(30, gradients=False) == 70
    rows = {"input_ids": torch.arange(100).view(50, 2), "attention_mask": torch.ones(50, 2, dtype=torch.bool)}
    model = RecordingModel()
    double, _ = forward_in_micro_batches(model, rows, limit=MicroBatchLimit(rows=1))
    assert [len(part) for part in model.rows] == [50] and not double.requires_grad


def test_placeholders_of_a_rank_without_rows_left_add_nothing_to_a_step(folder, monkeypatch):
    """Another rank needs 3 more micro-batches: loss, metrics and gradients are those of this rank alone."""
    from dschat.rlhf.updates import optimizer_steps

    results = []
    for others in (0, 3):
        monkeypatch.setattr(optimizer_steps, "max_over_ranks", lambda own, others=others: own + others)
        trainer = make_trainer(folder, actor_dropout=0.0, critic_dropout=0.0, entropy_coef=0.1)
        experience = trainer.generate_experience(prompts_of(trainer))
        passes = record_forward_passes(trainer)
        results.append((trainer.train_rlhf(experience), len(passes["actor"]), len(passes["critic"])))
    (alone, *counts), (together, *more) = results
    assert [count + 3 for count in counts] == more
    assert together == pytest.approx(alone, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("padded", [False, True])
def test_a_rank_without_rows_has_empty_micro_batches(padded):
    """Two rows on three ranks: one each, and none on the last."""
    limit = MicroBatchLimit(rows=1, padded=padded)
    assert [limit.rank_share([5, 3], rank=rank, world_size=3) for rank in range(3)] == [[[0]], [[1]], [[]]]
