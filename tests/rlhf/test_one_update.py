"""With one update per rollout, its forward passes also give old log-probs and values: same step, fewer passes."""

import deepspeed
import pytest
import torch
from rlhf_models import QUESTIONS, make_trainer, one_iteration, prompts_of, relative_distance, save_models

from dschat.rlhf.experience import Experience

pytestmark = pytest.mark.usefixtures("single_rank_group")
# All 16 responses in one minibatch; one forward pass for each batch of 8 responses, and one for the update.
SETTINGS = {
    "algorithm": "grpo", "num_samples_per_prompt": 2, "kl_in": "loss", "kl_coef": 0.1, "kl_estimator": "k3",
    "per_device_training_batch_size": 100, "actor_learning_rate": 1e-3,
}  # fmt: skip
CASES = {
    "grpo": {},
    "critic": {"algorithm": "ppo"},
    "entropy bonus": {"entropy_coef": 0.1},
    "rollout correction": {"rollout_correction": "tis", "rollout_correction_cap": 1.0, "top_k": 20},
    "many micro-batches": {"max_tokens_per_micro_batch": 60},
    "padded": {"remove_padding": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


def iteration(folder, updates_per_rollout, **changes):
    """Experiences, metrics of the update, weights before and after, forward passes of the actor."""
    trainer = make_trainer(folder, updates_per_rollout=updates_per_rollout, **SETTINGS | changes)
    with torch.no_grad():  # another actor than the reference model, so that KL is not 0
        for parameter in trainer.engine.policy.parameters():
            parameter.mul_(1.1)
    calls = []
    trainer.engine.policy.module.register_forward_pre_hook(lambda *_: calls.append(1))
    before = {name: p.detach().clone() for name, p in trainer.engine.policy.named_parameters()}
    parts, (metrics,) = one_iteration(trainer, QUESTIONS, minibatch_size=16, ppo_epochs=1)
    return parts, metrics, before, dict(trainer.engine.policy.named_parameters()), len(calls)


def scored_metrics(experience: Experience) -> dict[str, float]:
    """What a rollout logs that has old log-probs: KL per response, entropy and decoder mismatch per token."""
    mask = experience.response_mask
    delta = (experience.old_logprobs - experience.rollout_logprobs)[mask]
    return {
        "kl": float(experience.kl[mask].sum()) / len(experience),
        "entropy": float(experience.entropy[mask].mean()),
        "rollout_logprob_mismatch_mean": float(delta.abs().mean()),
        "rollout_logprob_mismatch_max": float(delta.abs().max()),
        "rollout_ratio": float(delta.exp().mean()),
    }


@pytest.mark.parametrize("case", CASES)
def test_one_update_equals_an_update_with_log_probs_computed_beforehand(folder, case):
    parts, expected, start, weights, passes = iteration(folder, None, **CASES[case])
    lean_parts, metrics, lean_start, lean_weights, lean_passes = iteration(folder, 1, **CASES[case])
    assert all(torch.equal(start[name], lean_start[name]) for name in start)
    whole = Experience.concatenate(parts)
    logged = scored_metrics(whole)
    assert logged["kl"] > 0.1 and whole.trained.all()
    for part in lean_parts:
        assert part.old_logprobs is None and part.entropy is None and part.kl is None and part.ref_logprobs is not None
    if case == "rollout correction":
        assert expected["correction_weight"] < 0.99 and logged["rollout_logprob_mismatch_max"] > 0.1
    # A log-prob mismatch of rounding alone depends on how the rows are cut.
    assert {name: metrics[name] for name in logged} == pytest.approx(logged, rel=1e-4, abs=1e-4)
    assert metrics["rollout_logprob_mismatch_mean"] == pytest.approx(
        logged["rollout_logprob_mismatch_mean"], rel=0.5, abs=1e-6
    )
    common = metrics.keys() - logged.keys() | (expected.keys() & logged.keys())
    assert common - logged.keys() == expected.keys() - logged.keys()
    for name in common:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=2e-6), name
    assert metrics["ratio"] == pytest.approx(1, abs=1e-6) and metrics["clip_fraction"] == 0
    assert relative_distance(lean_weights, weights, start) < 0.003
    if case in ("many micro-batches", "padded"):
        assert lean_passes < passes
    else:
        assert (passes, lean_passes) == (3, 1)


CRITIC_CASES = {
    "KL in the reward": {"kl_in": "reward"},
    "KL in the loss": {"num_samples_per_prompt": 1},
    "discounts": {"gamma": 0.9, "gae_lambda": 0.8, "whiten_advantages": False},
    "many micro-batches": {"max_tokens_per_micro_batch": 60, "kl_in": "reward"},
    "responses without training": {"mask_truncated": True, "max_tokens_per_micro_batch": 60},
    "padded": {"remove_padding": False},
    "zero 3": {"critic_zero_stage": 3, "actor_zero_stage": 3},
}


def critic_iteration(folder, updates_per_rollout, **changes):
    """Experiences, metrics of the update, weights of both models before and after, forward passes of the critic."""
    settings = SETTINGS | {"algorithm": "ppo", "critic_learning_rate": 1e-3, "whiten_advantages": True} | changes
    trainer = make_trainer(folder, updates_per_rollout=updates_per_rollout, **settings)
    calls, before, after = [], {}, {}
    trainer.engine.critic.module.register_forward_pre_hook(lambda *_: calls.append(1))
    for weights in (before, after):
        for model, engine in trainer.engine.trained.items():
            with deepspeed.zero.GatheredParameters(list(engine.parameters())):
                weights |= {f"{model} {name}": p.detach().clone() for name, p in engine.named_parameters()}
        if weights is before:
            rows = len(QUESTIONS) * trainer.ppo.num_samples_per_prompt
            parts, (metrics,) = one_iteration(trainer, QUESTIONS, minibatch_size=rows, ppo_epochs=1)
    return parts, metrics, before, after, len(calls)


@pytest.mark.parametrize("case", CRITIC_CASES)
def test_values_and_advantages_of_the_update_equal_those_computed_beforehand(folder, case):
    parts, expected, start, weights, passes = critic_iteration(folder, None, **CRITIC_CASES[case])
    lean_parts, metrics, lean_start, lean_weights, lean_passes = critic_iteration(folder, 1, **CRITIC_CASES[case])
    assert all(torch.equal(start[name], lean_start[name]) for name in start)
    whole = Experience.concatenate(parts)
    assert whole.returns is not None and whole.trained.all() == (case != "responses without training")
    for part in lean_parts:
        assert part.values is None and part.advantages is None and part.returns is None and part.rewards is not None
    for name in expected.keys() & metrics.keys():
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=2e-6), name
    assert {"value_loss", "return_mean", "explained_variance", "policy_loss", "actor_grad_norm"} <= metrics.keys()
    assert metrics["value_clip_fraction"] == 0
    for model in ("actor", "critic"):
        actual, reference, origin = (
            {name: tensor for name, tensor in group.items() if name.startswith(model)}
            for group in (lean_weights, weights, start)
        )
        assert relative_distance(actual, reference, origin) < 0.003
    assert lean_passes < passes


def test_whitened_advantages_of_the_update_have_unit_variance(folder):
    trainer = make_trainer(folder, updates_per_rollout=1, algorithm="ppo", max_tokens_per_micro_batch=60)
    experience = trainer.generate_experience(prompts_of(trainer))
    trainer.train_rlhf(experience)
    advantages = experience.advantages[experience.trained_mask].double()
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-5)
    assert float(advantages.square().mean()) == pytest.approx(1, abs=1e-4)


def test_a_critic_with_dropout_gives_its_values_beforehand(folder):
    trainer = make_trainer(folder, updates_per_rollout=1, algorithm="ppo", critic_dropout=0.1)
    experience = trainer.generate_experience(prompts_of(trainer))
    assert experience.values is not None and experience.advantages is not None


def test_an_evaluation_runs_no_critic(folder):
    trainer = make_trainer(folder, algorithm="ppo")
    calls = []
    trainer.engine.critic.module.register_forward_pre_hook(lambda *_: calls.append(1))
    assert trainer.rollout_and_score(prompts_of(trainer), iteration=0).experience.values is None and not calls


REASONS = {  # why the log-probs are computed beforehand nevertheless
    "dropout": {"actor_dropout": 0.1},
    "several updates": {"updates_per_rollout": 2},
    "unknown updates": {"updates_per_rollout": None},
    "KL in the reward": {"algorithm": "ppo", "kl_in": "reward"},
    "rollouts that the actor is not trained on": {"actor_freeze_steps": 1},
}


@pytest.mark.parametrize("reason", REASONS)
def test_log_probs_are_computed_beforehand_where_the_update_cannot_give_them(folder, reason):
    trainer = make_trainer(folder, **SETTINGS | {"updates_per_rollout": 1} | REASONS[reason])
    assert trainer.old_logprobs == "recompute"
    experience = trainer.generate_experience(prompts_of(trainer))
    assert experience.old_logprobs is not None and experience.entropy is not None and experience.kl is not None
    if reason == "dropout":  # the update's own log-probs are others
        before = experience.old_logprobs.clone()
        recorded = []
        trainer.train_rlhf(experience, record=lambda rows, name, tensor: recorded.append((name, rows, tensor.detach())))
        ((rows, logprobs),) = [(rows, tensor) for name, rows, tensor in recorded if name == "logprobs"]
        assert (before[rows] - logprobs)[experience.response_mask[rows]].abs().max() > 1e-3


def test_the_decoders_log_probs_stay_the_old_ones(folder):
    trainer = make_trainer(folder, **SETTINGS, updates_per_rollout=1, old_logprobs="rollout")
    experience = trainer.generate_experience(prompts_of(trainer))
    assert trainer.old_logprobs == "rollout" and torch.equal(experience.old_logprobs, experience.rollout_logprobs)


def test_an_evaluation_has_its_own_log_probs(folder):
    trainer = make_trainer(folder, **SETTINGS, updates_per_rollout=1)
    experience = trainer.rollout_and_score(prompts_of(trainer), iteration=0).experience
    assert experience.old_logprobs is not None and experience.entropy is not None and experience.kl is not None
