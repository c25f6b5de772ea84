"""Every algorithm on tiny models against a reference in plain torch; which tokens train, which weights stay fixed."""

import copy
import math
from pathlib import Path
from typing import Any

import algorithm_ranks
import plain_algorithms
import pytest
import torch
import transformers as hf
from plain_ppo import Row
from rlhf_models import QUESTIONS, make_trainer, one_iteration, prompts_of, relative_distance, save_models

from dschat.rlhf.experience import Experience
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.rlhf.rollouts.result import Timings

COMMON = {"num_samples_per_prompt": 2, "per_device_training_batch_size": 8, "clip_range": 0.02, "kl_coef": 0.2,
          "reward_clip": 0.4, "missing_eos_penalty": 0.5, "temperature": 0.7, "max_answer_seq_len": 6}  # fmt: skip
# Each algorithm once, and among them every loss, aggregation, estimator and placement.
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kl_clip": 1e-3},
    "dr_grpo": {"kl_estimator": "k3+", "entropy_coef": 0.3, "kl_coef": 0.3, "num_samples_per_prompt": 4},
    "rloo": {"policy_loss": "gspo", "clip_range": 0.005, "loss_aggregation": "seq_mean_token_mean"},
    "reinforce++": {"policy_loss": "cispo", "gamma": 0.9, "num_samples_per_prompt": 1},
    "reinforce++_baseline": {"policy_loss": "sapo", "sapo_negative_temperature": 3.0, "sapo_positive_temperature": 9.0},
    "remax": {"gamma": 0.8, "kl_estimator": "k3", "kl_clip": 1e-3, "dual_clip": 1.01, "policy_loss": "ppo_clip"},
    "opo": {"overlong_buffer": 4, "overlong_factor": 0.7, "rollout_correction": "seq_mis",
            "rollout_correction_cap": 1.15, "rollout_correction_floor": 0.9, "kl_in": "loss", "kl_estimator": "k1"},
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("single_rank_group")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def plain_models(folder: Path) -> list[hf.PreTrainedModel]:
    """Actor (its weights differ from the reference's), ref, reward."""
    kinds = ((hf.AutoModelForCausalLM, "actor"),) * 2 + ((hf.AutoModelForSequenceClassification, "reward"),)
    actor, *others = [kind.from_pretrained(folder / name, dtype=torch.float32).eval() for kind, name in kinds]
    actor.get_input_embeddings().padding_idx = None  # a sampled pad token is trained too
    return [perturb_weights(actor), *others]


@torch.no_grad()
def perturb_weights(actor: torch.nn.Module) -> torch.nn.Module:
    """Change all weights in place, none to 0: at the pad token's zero embedding a norm's gradient is all rounding."""
    for parameter in actor.parameters():
        parameter.mul_(1.1)
        parameter[parameter == 0] = 0.1
    return actor


def trainer_of(folder: Path, algorithm: str, **changes: Any) -> DeepSpeedPPOTrainer:
    trainer = make_trainer(folder, **COMMON | {"algorithm": algorithm} | CASES.get(algorithm, {}) | changes)
    perturb_weights(trainer.engine.policy)
    return trainer


def settings_of(trainer: DeepSpeedPPOTrainer) -> dict[str, Any]:
    return vars(trainer.ppo) | {"temperature": 0.7, "max_answer_seq_len": 6}


def rows_of(experience: Experience) -> list[Row]:
    prompt = experience.sequences.shape[1] - experience.response_mask.shape[1]
    return [
        Row(ids[:prompt][attended[:prompt]], ids[prompt:][mask], bool(ended))
        for ids, attended, mask, ended in zip(
            experience.sequences, experience.attention_mask, experience.response_mask, experience.ended, strict=True
        )
    ]


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def unchanged(before: dict[str, torch.Tensor], module: torch.nn.Module) -> bool:
    return all(torch.equal(before[name], parameter) for name, parameter in module.named_parameters())


@pytest.mark.parametrize("algorithm", CASES)
def test_experience_and_updates_equal_a_plain_torch_implementation_row_by_row(folder, algorithm):
    trainer = trainer_of(folder, algorithm)
    s, size = settings_of(trainer), trainer.ppo.num_samples_per_prompt
    experience = trainer.generate_experience(prompts_of(trainer, QUESTIONS[: max(4, 8 // size)]))
    rows, (actor, ref, reward) = rows_of(experience), plain_models(folder)
    assert 0 < experience.ended.sum() < len(rows), "both ended and truncated responses are needed"
    assert trainer.engine.critic is None and experience.values is None and experience.returns is None
    plain_algorithms.experience(rows, actor, ref, reward, trainer.stop_ids, s)
    if trainer.ppo.kl_clip:
        assert 0 < (experience.kl == trainer.ppo.kl_clip).sum() < experience.response_mask.sum()
    for number, row in enumerate(rows):
        mask = experience.response_mask[number]
        for name in ("old_logprobs", "ref_logprobs", "entropy", "kl", "rewards", "advantages"):
            actual = getattr(experience, name)[number]
            torch.testing.assert_close(
                actual[mask], row.expected[name], atol=5e-5, rtol=1e-4, msg=lambda m, n=name: n + m
            )
            assert not actual[~mask].any(), name
    # With a rollout correction: a decoder with a mismatch of e^0.1 and e^−0.2 in turn
    if trainer.policy_update.actor_loss.corrects_rollouts:
        mismatch = torch.tensor([0.1, -0.2, 0.1, -0.2, 0.1, -0.2])[: experience.response_mask.shape[1]]
        experience.rollout_logprobs = experience.old_logprobs - mismatch
        for row in rows:
            product = math.exp(float(mismatch[: len(row.response)].sum()))
            row.expected["weights"] = product if 0.9 <= product <= 1.15 else 0.0
        assert len({row.expected["weights"] for row in rows} - {0.0}) > 1
    if trainer.ppo.whiten_advantages:
        plain_algorithms.whiten(rows)
        counted = experience.advantages[experience.response_mask]
        experience.advantages[experience.response_mask] = (counted - counted.mean()) / counted.std(correction=0)
    adam = torch.optim.AdamW(actor.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        actual = trainer.train_rlhf(experience)
        policy, total = plain_algorithms.losses(rows, actor, s)
        assert actual["policy_loss"] == pytest.approx(policy.item(), abs=2e-5, rel=2e-4)
        adam.zero_grad()
        total.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in actor.parameters() if p.grad is not None])
        assert actual["actor_grad_norm"] == pytest.approx(float(norm), rel=2e-3)
        adam.step()
    assert actual["clip_fraction"] < 1 and (actual["clip_fraction"] > 0 or trainer.ppo.policy_loss == "sapo")
    parameters = dict(trainer.engine.policy.module.model.named_parameters())
    for name, parameter in actor.named_parameters():
        # A step moves a weight by 1e-4, whichever way its gradient points.
        torch.testing.assert_close(parameters[name], parameter, atol=5e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("algorithm", ["ppo", *CASES])
def test_only_the_models_that_an_algorithm_needs_are_built(folder, algorithm):
    engine = make_trainer(folder, algorithm=algorithm, num_samples_per_prompt=2, kl_coef=0.0).engine
    assert (engine.critic is None) == (algorithm != "ppo") and engine.ref is None
    assert list(engine.trained) == (["actor", "critic"] if algorithm == "ppo" else ["actor"])
    assert engine.reward is not None and not engine.shadow_models
    function = folder / "ones.py"
    function.write_text("def ones(prompts, responses, rows):\n    return [1.0] * len(responses)\n")
    rule_based = make_trainer(folder, algorithm=algorithm, num_samples_per_prompt=2, reward=[f"{function}:ones"],
                         reward_model_name_or_path=None, critic_model_name_or_path=str(folder / "reward"))  # fmt: skip
    assert rule_based.engine.reward is None and rule_based.engine.ref is not None


# --- which responses train -------------------------------------------------------------------------------------------


def test_mask_truncated_excludes_truncated_responses_from_the_update(folder):
    """The update equals that on the ended rows only, normalizer included."""
    trainer, reference = (trainer_of(folder, "dr_grpo", mask_truncated=True) for _ in range(2))
    experience = trainer.generate_experience(prompts_of(trainer, QUESTIONS[:4]))
    assert torch.equal(experience.trained, experience.ended) and 0 < experience.ended.sum() < len(experience)
    ended = experience.ended.nonzero().flatten()
    reference.ppo.per_device_training_batch_size = len(ended)
    expected = reference.train_rlhf(experience.rows(ended))
    actual = trainer.train_rlhf(experience)
    for name in ("policy_loss", "kl_loss", "entropy_bonus", "actor_grad_norm", "ratio"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


SOME = """
def some(prompts, responses, rows):
    return [None if len(response) % 3 == 0 else float(len(response)) for response in responses]
"""


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "opo", "reinforce++_baseline"])
def test_a_response_without_a_score_is_excluded_from_the_update_and_from_baselines(folder, algorithm, tmp_path):
    """As if the response had never been sampled: baselines are computed from the others."""
    (tmp_path / "some.py").write_text(SOME.replace("None if", "float('nan') if"))
    size = 4
    trainer = trainer_of(folder, algorithm, reward=[f"{tmp_path / 'some.py'}:some"], reward_model_name_or_path=None,
                         reward_clip=3.0, num_samples_per_prompt=size, kl_coef=0.0, overlong_buffer=0,
                         rollout_correction="none", overlong_factor=1.0)  # fmt: skip
    result = trainer.rollout(prompts_of(trainer, QUESTIONS[:6]))
    experience, has_score = result.experience, result.experience.has_score
    assert torch.equal(experience.trained, has_score) and 0 < has_score.sum() < len(has_score)
    texts = [sample["response"] for sample in result.samples]
    assert has_score.tolist() == [len(text) % 3 != 0 for text in texts]
    for first in range(0, len(texts), size):
        rows = [row for row in range(first, first + size) if has_score[row]]
        if len(rows) < 2:
            continue
        totals = [min(len(texts[row]), 3.0) - (0.0 if experience.ended[row] else 0.5) for row in rows]
        lengths = [int(experience.response_mask[row].sum()) for row in rows]
        mean = sum(totals) / len(rows)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in totals) / (len(rows) - 1))
        for row, own in zip(rows, totals, strict=True):
            expected = {
                "grpo": (own - mean) / (deviation + 1e-6),
                "rloo": own - (sum(totals) - own) / (len(rows) - 1),
                "opo": own - sum(a * b for a, b in zip(lengths, totals, strict=True)) / sum(lengths),
                "reinforce++_baseline": own - mean,
            }[algorithm]
            last = int(experience.response_mask[row].sum()) - 1
            assert experience.advantages[row, last].item() == pytest.approx(expected, abs=1e-5), (row, totals)


def test_a_response_without_a_greedy_baseline_is_not_trained_on(folder, tmp_path):
    (tmp_path / "some.py").write_text(SOME.replace("None if", "float('nan') if"))
    trainer = trainer_of(folder, "remax", reward=[f"{tmp_path / 'some.py'}:some"], reward_model_name_or_path=None)
    prompts = prompts_of(trainer)
    greedy, has_score = trainer.greedy_scores(prompts, Timings())
    assert greedy.shape == has_score.shape == (16,) and 0 < has_score.sum() < 16
    experience = trainer.generate_experience(prompts)
    assert torch.equal(experience.trained, experience.has_score & has_score)


def test_a_step_without_trained_tokens_is_skipped_and_changes_no_weight(folder):
    trainer = trainer_of(folder, "opo", entropy_coef=0.1)
    experience = trainer.generate_experience(prompts_of(trainer, QUESTIONS[:4]))
    trainer.train_rlhf(experience)
    before, rate = weights(trainer.engine.policy), trainer.engine.policy.get_lr()
    experience.trained[:] = False
    assert trainer.train_rlhf(experience) == {"skipped_updates": 0.0, "updates_without_signal": 1.0}
    assert unchanged(before, trainer.engine.policy) and trainer.engine.policy.get_lr() == rate


# --- which weights change --------------------------------------------------------------------------------------------


def test_a_frozen_actor_is_unchanged_bit_for_bit_while_the_critic_is_trained(folder):
    trainer = make_trainer(folder, actor_freeze_steps=1, enable_ema=True)
    minibatch = trainer.generate_experience(prompts_of(trainer, QUESTIONS[:4]))
    actor, critic = weights(trainer.engine.policy), weights(trainer.engine.critic)
    metrics = trainer.train_rlhf(minibatch, freeze_actor=True)
    assert unchanged(actor, trainer.engine.policy) and unchanged(actor, trainer.engine.actor_ema)
    assert not unchanged(critic, trainer.engine.critic)
    assert "policy_loss" not in metrics and metrics["value_loss"] > 0 and metrics["skipped_updates"] == 0
    trainer.train_rlhf(minibatch)
    assert not unchanged(actor, trainer.engine.policy)


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_refreshed_reference_equals_the_actor_so_kl_is_0(folder, stage, lora):
    trainer = make_trainer(folder, algorithm="grpo", num_samples_per_prompt=2, ref_refresh_interval=1,
                           actor_zero_stage=stage, actor_lora_dim=lora, only_optimize_lora=bool(lora),
                           actor_learning_rate=3e-3)  # fmt: skip
    prompts = prompts_of(trainer, QUESTIONS[:4])
    assert not trainer.generate_experience(prompts).kl.any(), "new adapters change nothing"
    for _ in range(2):
        trainer.train_rlhf(trainer.generate_experience(prompts))
    assert trainer.generate_experience(prompts).kl.abs().max() > 1e-4
    trainer.engine.refresh_reference()
    assert not trainer.generate_experience(prompts).kl.any(), "bit for bit"
    assert list(trainer.engine.shadow_models) == ["ref"]
    trainer.train_rlhf(trainer.generate_experience(prompts))
    assert trainer.generate_experience(prompts).kl.abs().max() > 1e-5, "the reference is a copy, not the actor itself"


def test_the_entropy_bonus_raises_entropy_and_the_kl_loss_lowers_kl(folder):
    """With that term alone in the loss."""
    entropy_trainer, kl_trainer = (
        trainer_of(folder, "opo", entropy_coef=1.0),
        trainer_of(folder, "grpo", kl_coef=1.0, kl_clip=0.0),
    )
    for trainer, name in ((entropy_trainer, "entropy"), (kl_trainer, "kl")):
        experience = trainer.generate_experience(prompts_of(trainer, QUESTIONS[:4]))
        without_advantages = copy.copy(experience)
        without_advantages.advantages = torch.zeros_like(experience.advantages)
        if name == "kl":
            first = trainer.train_rlhf(without_advantages)["kl_loss"]
            assert [trainer.train_rlhf(without_advantages)["kl_loss"] for _ in range(3)][-1] < first
        else:
            without_advantages.ref_logprobs = None
            first = trainer.train_rlhf(without_advantages)["entropy_bonus"]
            assert [trainer.train_rlhf(without_advantages)["entropy_bonus"] for _ in range(3)][-1] > first


@pytest.mark.parametrize("cut", [(4, 2), (2, 4)])
@pytest.mark.parametrize("algorithm", ["dr_grpo", "rloo", "reinforce++_baseline"])
def test_an_update_does_not_depend_on_the_micro_batch_size(folder, algorithm, cut):
    outcomes = []
    for size, steps in ((8, 1), cut):
        trainer = trainer_of(
            folder, algorithm, per_device_training_batch_size=size, gradient_accumulation_steps=steps,
            mask_truncated=True, num_samples_per_prompt=2,
        )  # fmt: skip
        outcomes.append(one_iteration(trainer, QUESTIONS, minibatch_size=8, ppo_epochs=2)[1])
    assert len(outcomes[0]) == 4
    for one, other in zip(*outcomes, strict=True):
        assert one == pytest.approx(other, abs=2e-5, rel=2e-3)


# --- two ranks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """Models in which no embedding is 0."""
    folder = save_models(tmp_path_factory.mktemp("shared"))
    actor = hf.AutoModelForCausalLM.from_pretrained(folder / "actor", dtype=torch.float32)
    perturb_weights(actor).save_pretrained(folder / "actor")
    return folder


@pytest.fixture(scope="module")
def two_ranks(shared, programs) -> dict[str, Any]:
    script = Path(__file__).with_name("algorithm_ranks.py")
    programs.run(script, [shared], processes=2, log=shared / "log")
    return torch.load(shared / "algorithms.pt")


@pytest.mark.parametrize("algorithm", algorithm_ranks.CASES)
def test_two_ranks_under_any_zero_stage_train_as_one_process_does(shared, two_ranks, algorithm):
    actual, expected = two_ranks[algorithm], algorithm_ranks.scenario(shared, algorithm)
    assert actual["trained"] == expected["trained"] and len(actual["updates"]) == 8
    for line, other in zip(actual["updates"], expected["updates"], strict=True):
        assert line == pytest.approx(other, rel=1e-3, abs=1e-4)
    if algorithm == "grpo":
        assert actual["answers"] == expected["answers"] and len(actual["answers"]) == 21
        line, other = ({name: x for name, x in case["evaluation"].items() if name != "rollout_logprob_mismatch_max"}
                        for case in (actual, expected))  # fmt: skip
        assert line == pytest.approx(other, rel=1e-3, abs=1e-4) and 0 < line["mean@3"] < 1
    origins = {"actor": hf.AutoModelForCausalLM, "critic": hf.AutoModelForSequenceClassification}
    assert ("critic" in actual) == (algorithm == "ppo")
    for name in origins.keys() & actual.keys():
        path = shared / {"actor": "actor", "critic": "reward"}[name]
        start = dict(origins[name].from_pretrained(path, dtype=torch.float32).named_parameters())
        assert relative_distance(actual[name], expected[name], start) < 0.01
    if "ref_refresh_interval" in algorithm_ranks.CASES[algorithm][2]:
        assert all(torch.equal(actual["ref"][name], weight) for name, weight in actual["actor"].items())
