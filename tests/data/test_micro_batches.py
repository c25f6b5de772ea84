"""Scoring in micro-batches: bounded forward passes, equal results, and ranks in lockstep."""

import copy
from pathlib import Path

import pytest
import torch
from rlhf_models import QUESTIONS, make_trainer, prompts_of, save_models
from torch import nn

from dschat import arguments
from dschat.distributed import micro_batches
from dschat.distributed.micro_batches import forward_in_micro_batches
from dschat.generation import SamplingParams
from dschat.models.tokenizer import load_tokenizer
from dschat.preference import response_scoring
from dschat.rlhf.rollouts.result import Timings

pytestmark = pytest.mark.usefixtures("single_rank_group")


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"), request.param, dropout=0.5)


def record_forward_passes(trainer) -> dict[str, list[tuple[int, bool]]]:
    """Rows of each forward pass of each model, and whether any of its modules was training."""
    engine, passes = trainer.engine, {}
    models = {"actor": engine.policy, "ref": engine.ref, "critic": engine.critic, "reward": engine.reward}
    for name, model in models.items():
        calls = passes[name] = []

        def record(module, args, kwargs, calls=calls):
            calls.append((len(kwargs["input_ids"]), any(part.training for part in module.modules())))

        model.module.model.base_model.register_forward_pre_hook(record, with_kwargs=True)
    return passes


@pytest.mark.parametrize("algorithm", ["ppo", "remax"])
def test_an_experience_does_not_depend_on_the_micro_batch_and_no_forward_pass_exceeds_it(folder, algorithm):
    settings = {"algorithm": algorithm, "num_samples_per_prompt": 2, "gradient_accumulation_steps": 8}
    if algorithm == "remax":
        settings |= {"kl_in": "reward", "kl_coef": 0.1}
    experiences = {}
    for size in (16, 3):
        trainer = make_trainer(folder, **settings, per_device_training_batch_size=size)
        trainer.engine.policy.train()  # as an update leaves it
        passes = record_forward_passes(trainer) if trainer.engine.critic is not None else {}
        experiences[size] = trainer.generate_experience(prompts_of(trainer))
        assert len(experiences[size]) == 16
        for name, calls in passes.items():
            sizes = [rows for rows, _ in calls]
            assert sizes == ([16] if size == 16 else [3, 3, 3, 3, 3, 1]), name
            assert not any(training for _, training in calls), f"{name} is in training mode while it scores"
    full, split = experiences[16], experiences[3]
    assert torch.equal(full.sequences, split.sequences)
    for name, expected in vars(full).items():
        if isinstance(expected, torch.Tensor):
            actual = getattr(split, name)
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: n + m)


def test_greedy_baselines_and_evaluations_are_split_too(folder):
    trainer = make_trainer(folder, per_device_training_batch_size=3, gradient_accumulation_steps=8)
    passes = record_forward_passes(trainer)
    trainer.greedy_scores(prompts_of(trainer), Timings())
    assert [rows for rows, _ in passes["reward"]] == [3, 3, 2]
    trainer.rollout_and_score(prompts_of(trainer, QUESTIONS[:4]), iteration=1)
    assert {rows for calls in passes.values() for rows, _ in calls[-2:]} == {3, 1}


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
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    scores = score(rollout, answers)
    assert rows == [3, 3, 1]
    built[0].micro_batch_size = None
    assert scores == pytest.approx(score(rollout, answers), abs=1e-6)


class RecordingModel(nn.Module):
    """Returns twice its input and its square; records the rows of each forward pass."""

    def __init__(self, *, partitioned: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.rows: list[list[float]] = []
        if partitioned:
            self.weight.ds_id = 0

    def forward(self, x, factor=1):
        self.rows.append(x[:, 0].tolist())
        return 2 * x * factor, x.square()


@pytest.mark.parametrize(("other_passes", "repeated"), [(3, 0), (5, 2)])
def test_a_rank_with_fewer_rows_runs_as_many_forward_passes_and_returns_only_its_own_rows(
    monkeypatch, other_passes, repeated
):
    """5 rows, 2 at a time, take 3 passes; another rank takes `other_passes`."""
    agreed = []

    def max_over_ranks(passes):
        assert not model.rows, "ranks must agree on the number of passes before the first one"
        agreed.append(int(passes))
        return torch.tensor(max(int(passes), other_passes))

    monkeypatch.setattr(micro_batches, "max_over_ranks", max_over_ranks)
    x = torch.arange(10.0).view(5, 2)
    for partitioned in (True, False):
        model = RecordingModel(partitioned=partitioned)
        double, square = forward_in_micro_batches(model, x, micro_batch_size=2, factor=3)
        assert torch.equal(double, 6 * x) and torch.equal(square, x.square())
        assert model.rows == [[0, 2], [4, 6], [8]] + [[0]] * (repeated if partitioned else 0)
    assert agreed == [3], "without partitioned weights there is no collective"
    unsplit = copy.deepcopy(model)
    unsplit.rows = []
    assert torch.equal(forward_in_micro_batches(unsplit, x, micro_batch_size=None)[0], 2 * x)
    assert unsplit.rows == [[0, 2, 4, 6, 8]]
