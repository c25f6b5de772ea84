"""The four models and the EMA: which are trained, which stay fixed, and equality on one and two ranks."""

from pathlib import Path

import pytest
import rlhf_ranks
import torch
import transformers as hf
from rlhf_models import QUESTIONS, make_trainer, one_iteration, prompts_of, relative_distance, save_models

from dschat.models.weights import full_weights
from dschat.rlhf.experience import Experience

TESTS = Path(__file__).parent


pytestmark = pytest.mark.usefixtures("single_rank_group")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def saved(folder: Path, name: str) -> dict[str, torch.Tensor]:
    kind = hf.AutoModelForCausalLM if name == "actor" else hf.AutoModelForSequenceClassification
    return dict(kind.from_pretrained(folder / name, dtype=torch.float32).named_parameters())


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("lora", [0, 2])
def test_ema_weights_follow_the_decay_after_every_update(folder, lora):
    trainer = make_trainer(folder, enable_ema=True, ema_decay=0.75, actor_lora_dim=lora, only_optimize_lora=bool(lora))
    actor, average = trainer.engine.policy.module, trainer.engine.actor_ema.module
    assert equal(parameters(average), parameters(actor)), "it starts as the actor"
    minibatch = trainer.generate_experience(prompts_of(trainer))
    for _ in range(2):
        before = parameters(average)
        trainer.train_rlhf(minibatch)
        now = parameters(actor)
        for name, value in parameters(average).items():
            torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * now[name], atol=1e-6, rtol=0)
        moved = max((before[name] - now[name]).abs().max() for name in now)
        assert moved > 5e-5, "an average of constant weights proves nothing"


def test_frozen_models_do_not_change_and_the_reference_is_the_initial_policy(folder):
    trainer = make_trainer(folder, critic_lora_dim=0)
    engine = trainer.engine
    one_iteration(trainer, QUESTIONS, minibatch_size=4, ppo_epochs=1)
    assert equal(dict(full_weights(engine.ref)), saved(folder, "actor"))
    assert equal(dict(full_weights(engine.reward)), saved(folder, "reward"))
    assert not equal(dict(full_weights(engine.policy)), saved(folder, "actor"))
    assert not equal(dict(full_weights(engine.critic)), saved(folder, "reward")), "the critic began as the reward model"
    for frozen in (engine.ref, engine.reward):
        assert not frozen.module.training and not any(parameter.requires_grad for parameter in frozen.parameters())
    assert engine.trained == {"actor": engine.policy, "critic": engine.critic}
    assert engine.actor_ema is None


@pytest.mark.parametrize(
    ("critic", "reward", "critic_is", "reward_is"),
    [(None, "reward", "reward", "reward"), ("reward", None, "reward", "reward"), ("actor", "reward", None, "reward")],
)
def test_critic_and_reward_model_default_to_each_other_and_a_critic_can_start_from_the_actor(
    folder, critic, reward, critic_is, reward_is
):
    engine = make_trainer(
        folder, critic_model_name_or_path=critic and str(folder / critic),
        reward_model_name_or_path=reward and str(folder / reward),
    ).engine  # fmt: skip
    assert equal(dict(full_weights(engine.reward)), saved(folder, reward_is))
    if critic_is:
        assert equal(dict(full_weights(engine.critic)), saved(folder, critic_is))
        return
    backbone = {name: p for name, p in full_weights(engine.critic) if name.startswith("model.")}
    assert equal(backbone, {name: p for name, p in saved(folder, "actor").items() if name.startswith("model.")})


def test_only_adapters_are_trained_and_reach_the_rollout(folder):
    trainer = make_trainer(folder, actor_lora_dim=2, critic_lora_dim=2, only_optimize_lora=True)
    engine = trainer.engine
    before = parameters(engine.policy)
    minibatch = trainer.generate_experience(prompts_of(trainer))
    assert not minibatch.kl.any()
    trainer.train_rlhf(minibatch)
    moved = {name for name, value in parameters(engine.policy).items() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved)
    again = trainer.generate_experience(prompts_of(trainer))
    assert again.kl.abs().max() > 1e-4, "adapters reach the rollout's log-probs"
    torch.testing.assert_close(again.rollout_logprobs, again.old_logprobs, atol=1e-4, rtol=1e-4)


def base_model_logprobs(folder: Path, experience: Experience, temperature: float) -> torch.Tensor:
    """[B, T] by plain transformers from the saved folder, one unpadded row at a time."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "actor", dtype=torch.float32).eval()
    logprobs = torch.zeros(experience.response_mask.shape)
    for row, mask in enumerate(experience.response_mask):
        ids, count = experience.sequences[row][experience.attention_mask[row]], int(mask.sum())
        table = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        logprobs[row, mask] = table.gather(1, ids[1:, None])[-count:, 0].detach()
    return logprobs


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_with_adapters_alone_the_reference_is_the_base_model_before_and_after_updates(family, stage, tmp_path):
    folder = save_models(tmp_path, family)
    trainer = make_trainer(
        folder, actor_lora_dim=2, only_optimize_lora=True, lora_learning_rate=1e-2, actor_zero_stage=stage,
        critic_zero_stage=stage, per_device_training_batch_size=2,
    )  # fmt: skip
    assert trainer.engine.ref is None and trainer.engine.ref_is_policy
    for update in range(3):
        experience = trainer.generate_experience(prompts_of(trainer))
        expected = base_model_logprobs(folder, experience, trainer.rollouts.temperature)
        torch.testing.assert_close(experience.ref_logprobs, expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(experience.rollout_logprobs, experience.old_logprobs, atol=1e-4, rtol=1e-4)
        distance = float((experience.old_logprobs - expected).abs().max())
        assert distance < 2e-5 if update == 0 else distance > 0.05, "the policy itself has moved"
        trainer.train_rlhf(experience)


@pytest.mark.parametrize(
    "changes",
    [
        {"actor_lora_dim": 0}, {"actor_lora_dim": 2}, {"actor_lora_dim": 0, "critic_lora_dim": 2},
        {"actor_lora_dim": 2, "only_optimize_lora": True, "algorithm": "grpo", "num_samples_per_prompt": 2,
         "ref_refresh_interval": 1},
    ],
)  # fmt: skip
def test_a_policy_whose_own_weights_are_trained_or_whose_reference_is_refreshed_has_a_reference_model(folder, changes):
    engine = make_trainer(folder, **changes).engine
    assert engine.ref is not None and not engine.ref_is_policy
    with engine.reference() as reference:
        assert reference is engine.ref


def without_largest_mismatch(metrics: dict[str, float]) -> dict[str, float]:
    """All metrics but the largest mismatch, which in fp32 is pure rounding."""
    assert metrics["rollout_logprob_mismatch_max"] < 1e-4
    return {name: value for name, value in metrics.items() if name != "rollout_logprob_mismatch_max"}


@pytest.fixture(scope="module")
def one_process(folder):
    return rlhf_ranks.scenario(folder, 0)


@pytest.fixture(scope="module")
def two_ranks(folder, programs):
    programs.run(TESTS / "rlhf_ranks.py", [folder, 0, 2, 3], processes=2, log=folder / "log")
    return {stage: torch.load(folder / f"{stage}.pt") for stage in (0, 2, 3)}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_ranks_evaluate_train_and_average_as_one_process_does(folder, one_process, two_ranks, stage):
    actual, expected = two_ranks[stage], one_process
    for size in (1, 2):
        (metrics, answers, count), (others, other_answers, _) = (x[f"evaluation {size}"] for x in (actual, expected))
        assert count == 7 and answers == other_answers
        assert without_largest_mismatch(metrics) == pytest.approx(without_largest_mismatch(others), rel=1e-4, abs=1e-5)
        assert metrics["judge"] == pytest.approx((2**7 - 1) / 7)  # every row once
    first, second = (without_largest_mismatch(expected[f"evaluation {size}"][0]) for size in (1, 2))
    assert first == pytest.approx(second, rel=1e-4, abs=1e-5)
    assert actual["one batch on each device"] == expected["one batch on each device"] == 4
    assert len(actual["updates"]) == 4
    key = "updates with rollout log-probs"
    assert expected[key][0]["rollout_logprob_mismatch_max"] > 0.1 and len(actual[key]) == 2
    for update, expected_update in zip(
        actual["updates"] + actual[key], expected["updates"] + expected[key], strict=True
    ):
        assert update == pytest.approx(expected_update, rel=1e-3, abs=1e-4)
    for name, origin in (("actor", "actor"), ("critic", "reward"), ("average", "actor")):
        assert relative_distance(actual[name], expected[name], saved(folder, origin)) < 0.003
    for results in (actual, expected):
        assert equal(results["ref"], saved(folder, "actor")) and equal(results["reward"], saved(folder, "reward"))
        assert equal(results["reloaded average"], results["average"])
        assert equal(results["average with decay 0"], results["actor"])
        between = {
            name: (value - saved(folder, "actor")[name]).abs().max() for name, value in results["average"].items()
        }
        assert all(distance > 0 for distance in between.values()), "every parameter of the average has changed"
