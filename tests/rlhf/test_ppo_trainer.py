"""Experience and updates against a reference PPO in plain torch; invariances and unmodified inputs of an update."""

import copy
import math
from functools import partial
from pathlib import Path

import deepspeed
import plain_ppo
import pytest
import torch
import transformers as hf
from rlhf_models import QUESTIONS, group_of_one, make_trainer, one_iteration, prompts_of, relative_distance, save_models

from dschat.rlhf.experience import Experience
from dschat.rlhf.rollouts.result import Timings
from dschat.rlhf.updates.optimizer_steps import StepCounts

SETTINGS = plain_ppo.Settings(
    temperature=0.7, kl_coef=0.2, reward_clip=0.4, missing_eos_penalty=0.5, gamma=0.9, gae_lambda=0.95,
    clip_range=0.02, value_clip_range=0.01,
)  # fmt: skip
PPO = vars(SETTINGS)


pytestmark = pytest.mark.usefixtures("single_rank_group")


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def each_family(request, tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def plain_models(folder: Path) -> list[hf.PreTrainedModel]:
    """Actor, ref, critic, reward."""
    causal, classifier = hf.AutoModelForCausalLM, hf.AutoModelForSequenceClassification
    paths = [(causal, "actor"), (causal, "actor"), (classifier, "reward"), (classifier, "reward")]
    return [kind.from_pretrained(folder / name, dtype=torch.float32).eval() for kind, name in paths]


def rows_of(experience: Experience) -> list[plain_ppo.Row]:
    prompt = experience.sequences.shape[1] - experience.response_mask.shape[1]
    return [
        plain_ppo.Row(ids[:prompt][attended[:prompt]], ids[prompt:][mask], bool(ended))
        for ids, attended, mask, ended in zip(
            experience.sequences, experience.attention_mask, experience.response_mask, experience.ended, strict=True
        )
    ]


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def gradients(engine: deepspeed.DeepSpeedEngine, loss: torch.Tensor) -> list[torch.Tensor]:
    engine.backward(loss, scale_wrt_gas=False)
    result = [parameter.grad.clone() for parameter in engine.module.parameters()]
    for parameter in engine.module.parameters():
        parameter.grad = None
    return result


def whitened(experience: Experience) -> Experience:
    """A copy with whitened advantages, as MiniDataset returns it."""
    advantages = experience.advantages.clone()
    counted = advantages[experience.response_mask]
    advantages[experience.response_mask] = (counted - counted.mean()) / counted.std(correction=0)
    changed = copy.copy(experience)
    changed.advantages = advantages
    return changed


def drift(experience: Experience) -> torch.Tensor:
    """[B, T]: 0.2, −0.2, 0.2, …"""
    return (0.2 * (-1.0) ** torch.arange(experience.response_mask.shape[1])).expand(experience.response_mask.shape)


def with_rollout_mismatch(experience: Experience) -> Experience:
    """A copy with rollout log-probs that are off by e^0.2 and e^−0.2 in turn."""
    changed = copy.copy(experience)
    changed.rollout_logprobs = experience.old_logprobs - drift(experience)
    return changed


def test_experience_equals_plain_ppo_row_by_row(each_family):
    trainer = make_trainer(each_family, **PPO)
    with torch.no_grad():  # an actor other than the reference model, so that KL is not 0
        for parameter in trainer.engine.policy.parameters():
            parameter.mul_(1.1)
    experience = trainer.generate_experience(prompts_of(trainer))
    rows = rows_of(experience)
    assert 0 < experience.ended.sum() < len(rows), "both ended and truncated responses are needed"
    actor, ref, critic, reward = plain_models(each_family)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(1.1)
    plain_ppo.experience(rows, actor, ref, critic, reward, SETTINGS)
    assert max(row.expected["kl"].abs().max() for row in rows) > 0.05
    assert any(abs(row.expected["score"]) > SETTINGS.reward_clip for row in rows)
    for number, row in enumerate(rows):
        mask = experience.response_mask[number]
        for name in ("old_logprobs", "ref_logprobs", "entropy", "values", "kl", "rewards", "advantages", "returns"):
            actual = getattr(experience, name)[number]
            torch.testing.assert_close(
                actual[mask], row.expected[name], atol=2e-5, rtol=1e-4, msg=lambda m, n=name: n + m
            )
            if name != "values":  # values at padding are undefined
                assert not actual[~mask].any(), name
        torch.testing.assert_close(experience.scores[number], row.expected["score"], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(
            experience.rollout_logprobs[number], experience.old_logprobs[number], atol=1e-4, rtol=1e-4
        )


OLD_LOGPROBS = {
    "recomputed": {},
    "weighted": {"rollout_correction": "tis", "rollout_correction_cap": 1.1},
    "of the decoder": {"old_logprobs": "rollout"},
}


@pytest.mark.parametrize("which", OLD_LOGPROBS)
def test_three_updates_equal_plain_ppo_with_the_same_adam(folder, which):
    trainer = make_trainer(folder, **PPO, **OLD_LOGPROBS[which])
    experience = trainer.generate_experience(prompts_of(trainer))
    if which != "of the decoder":
        experience = with_rollout_mismatch(experience)
    minibatch, rows = whitened(experience), rows_of(experience)
    actor, ref, critic, reward = plain_models(folder)
    plain_ppo.experience(rows, actor, ref, critic, reward, SETTINGS)
    if which == "weighted":  # a decoder that is off by e^±0.2 in turn; the cap of 1.1 cuts every other weight
        for row in rows:
            row.expected["weights"] = torch.tensor([(1.1, math.exp(-0.2))[t % 2] for t in range(len(row.response))])
    advantages = plain_ppo.whitened(rows)
    adams = [
        torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        for model, rate in ((actor, 1e-4), (critic, 2e-4))
    ]
    for _ in range(3):
        metrics = trainer.train_rlhf(minibatch)
        expected = plain_ppo.losses(rows, actor, critic, advantages, SETTINGS)
        names = (("policy_loss", "actor_grad_norm"), ("value_loss", "critic_grad_norm"))
        for (name, gradient), loss, adam in zip(names, expected, adams, strict=True):
            assert metrics[name] == pytest.approx(loss.item(), abs=1e-5, rel=1e-4)
            adam.zero_grad()
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in adam.param_groups[0]["params"] if p.grad is not None])
            assert metrics[gradient] == pytest.approx(float(norm), rel=1e-3)
            adam.step()
    assert 0 < metrics["clip_fraction"] < 1, "both branches of the policy loss are needed"
    for engine, plain in ((trainer.engine.policy, actor), (trainer.engine.critic, critic)):
        parameters = dict(engine.module.model.named_parameters())
        for name, parameter in plain.named_parameters():
            # A step moves a weight by 1e-4 or 2e-4, whichever way its gradient points.
            torch.testing.assert_close(
                parameters[name], parameter, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_with_the_decoders_log_probs_the_actor_runs_no_scoring_pass_and_experience_is_equal(folder):
    trainers = {which: make_trainer(folder, **PPO, old_logprobs=which) for which in ("recompute", "rollout")}
    passes, experiences = {}, {}
    for which, trainer in trainers.items():
        with torch.no_grad():  # an actor other than the reference model, so that KL is not 0
            for parameter in trainer.engine.policy.parameters():
                parameter.mul_(1.1)
        calls = []
        hook = trainer.engine.policy.module.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        experiences[which] = trainer.generate_experience(prompts_of(trainer))
        passes[which] = len(calls)
        hook.remove()
    assert passes == {"recompute": 1, "rollout": 0}, "8 short rows are one pass"
    recomputed, decoders = experiences["recompute"], experiences["rollout"]
    assert torch.equal(decoders.old_logprobs, decoders.rollout_logprobs)
    assert torch.equal(decoders.entropy, -decoders.rollout_logprobs)
    assert recomputed.kl.abs().max() > 0.05
    for name in vars(recomputed).keys() - {"entropy"}:
        torch.testing.assert_close(
            getattr(decoders, name), getattr(recomputed, name), atol=5e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_mismatch_is_measured_on_the_first_minibatch_before_any_update(folder):
    trainer = make_trainer(folder, **PPO, old_logprobs="rollout", per_device_training_batch_size=2)
    experience = trainer.generate_experience(prompts_of(trainer))
    first = trainer.train_rlhf(whitened(experience), measure_mismatch=True)
    assert 0 < first["rollout_logprob_mismatch_mean"] < first["rollout_logprob_mismatch_max"] < 1e-4, "fp32"
    assert first["rollout_ratio"] == pytest.approx(1, abs=1e-6) and first["ratio"] == pytest.approx(1, abs=1e-6)
    fresh = trainer.generate_experience(prompts_of(trainer))
    minibatch = whitened(with_rollout_mismatch(fresh))
    minibatch.rollout_logprobs[-1, 0] = fresh.rollout_logprobs[-1, 0] + 1.0  # the largest is in the last micro-batch
    minibatch.old_logprobs = minibatch.rollout_logprobs
    delta = (fresh.rollout_logprobs - minibatch.rollout_logprobs)[fresh.response_mask]
    updates = [trainer.train_rlhf(minibatch, measure_mismatch=number == 0) for number in range(3)]
    mean, ratio = float(delta.abs().mean()), float(delta.exp().mean())
    expected = {"rollout_logprob_mismatch_mean": mean, "rollout_logprob_mismatch_max": 1.0, "rollout_ratio": ratio}
    assert {name: updates[0][name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert not expected.keys() & (updates[1].keys() | updates[2].keys()), "only the first update measures it"
    assert updates[2]["ratio"] != pytest.approx(updates[0]["ratio"], abs=1e-4), "the policy has changed"
    recomputing = make_trainer(folder, **PPO)
    result = recomputing.rollout(prompts_of(recomputing))
    assert float(result.mismatch["rollout_logprob_mismatch_max"]) < 1e-4
    metrics = recomputing.train_rlhf(whitened(result.experience))
    assert not any(name.startswith(("rollout_", "correction_")) for name in metrics), "the rollout measured it"


def test_correction_weights_are_logged_only_with_recomputed_old_log_probs(folder):
    tis = {"rollout_correction": "tis", "rollout_correction_cap": 1.1}
    trainer, decoders, plain = (
        make_trainer(folder, **PPO, **changes)
        for changes in (tis, tis | {"old_logprobs": "rollout"}, {"old_logprobs": "rollout"})
    )
    experience = with_rollout_mismatch(trainer.generate_experience(prompts_of(trainer)))
    even = torch.arange(experience.response_mask.shape[1]) % 2 == 0
    share = float((experience.response_mask & even).sum() / experience.response_mask.sum())
    metrics = trainer.train_rlhf(whitened(experience))
    assert metrics["correction_cut"] == pytest.approx(share)
    assert metrics["correction_weight"] == pytest.approx(1.1 * share + math.exp(-0.2) * (1 - share), abs=1e-5)
    metrics, others = (t.train_rlhf(whitened(t.generate_experience(prompts_of(t)))) for t in (decoders, plain))
    assert metrics == others and "correction_weight" not in metrics


def test_with_truncated_sampling_ratio_and_weight_are_the_kept_probability_mass(folder):
    changes = PPO | {"top_k": 4, "clip_range": 0.2}
    trainer = make_trainer(folder, **changes, old_logprobs="rollout")
    experience = trainer.generate_experience(prompts_of(trainer))
    actor, masses = plain_models(folder)[0], []
    for row in rows_of(experience):
        logits = actor(torch.cat([row.prompt, row.response])[None]).logits[0, len(row.prompt) - 1 : -1]
        masses += (logits / SETTINGS.temperature).softmax(-1).topk(4).values.sum(-1).tolist()
    mass = sum(masses) / len(masses)
    assert min(masses) < 0.8 and mass < 0.95, "top_k removes probability mass"
    metrics = trainer.train_rlhf(whitened(experience), measure_mismatch=True)
    assert metrics["ratio"] == pytest.approx(mass, rel=1e-4)
    assert metrics["rollout_ratio"] == pytest.approx(mass, rel=1e-4)
    assert metrics["rollout_logprob_mismatch_max"] == pytest.approx(-math.log(min(masses)), rel=1e-4)
    assert metrics["clip_fraction"] > 0, "before any update"
    trainer = make_trainer(folder, **changes, rollout_correction="tis")
    metrics = trainer.train_rlhf(whitened(trainer.generate_experience(prompts_of(trainer))))
    assert metrics["correction_weight"] == pytest.approx(mass, rel=1e-4) and metrics["correction_cut"] == 0
    assert metrics["ratio"] == pytest.approx(1, abs=1e-6) and metrics["clip_fraction"] == 0


def test_before_the_first_update_kl_is_0_and_the_ratio_1(folder):
    trainer = make_trainer(folder, **PPO)
    experience = trainer.generate_experience(prompts_of(trainer))
    assert not experience.kl.any(), "bit for bit: actor and reference are the same weights"
    metrics = trainer.train_rlhf(whitened(experience))
    assert metrics["ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert trainer.generate_experience(prompts_of(trainer)).kl.abs().max() > 1e-4, "after it, KL is not 0"


def test_dropout_is_off_while_experience_is_collected(tmp_path):
    folder = save_models(tmp_path, "gpt2", dropout=0.1)
    trainer = make_trainer(folder, **PPO, actor_dropout=0.1, critic_dropout=0.1)
    for _ in range(2):  # before and after training mode was switched on
        experience = trainer.generate_experience(prompts_of(trainer))
        again = trainer.generate_experience(prompts_of(trainer))
        for name in ("old_logprobs", "values", "scores"):
            assert torch.equal(getattr(experience, name), getattr(again, name)), name
        trainer.engine.policy.train()
        trainer.engine.critic.train()
    assert not experience.kl.any()
    metrics = trainer.train_rlhf(whitened(experience))
    assert metrics["approx_kl"] > 1e-4, "dropout does act in an update"


@pytest.mark.parametrize(("micro", "accumulation", "whole"), [(2, 2, 4), (1, 4, 4)])
def test_an_update_does_not_depend_on_the_micro_batch_size(folder, micro, accumulation, whole):
    outcomes = []
    for size, steps in ((whole, 1), (micro, accumulation)):
        trainer = make_trainer(
            folder, **PPO, per_device_training_batch_size=size, gradient_accumulation_steps=steps, max_grad_norm=0.5
        )
        start = weights(trainer.engine.policy), weights(trainer.engine.critic)
        _, metrics = one_iteration(trainer, QUESTIONS, minibatch_size=whole, ppo_epochs=2)
        outcomes.append((metrics, weights(trainer.engine.policy), weights(trainer.engine.critic)))
    (metrics, *expected), (cut_metrics, *actual) = outcomes
    assert len(metrics) == len(cut_metrics) == 4
    for one, other in zip(metrics, cut_metrics, strict=True):
        assert one == pytest.approx(other, abs=1e-5, rel=1e-3)
    for one, other, before in zip(expected, actual, start, strict=True):
        assert relative_distance(other, one, before) < 0.003


@pytest.mark.parametrize("which", ["policy", "critic"])
def test_loss_and_gradient_do_not_depend_on_padding_or_its_content(folder, which):
    trainer = make_trainer(folder, **PPO)
    experience = whitened(trainer.generate_experience(prompts_of(trainer)))
    pad = torch.nn.functional.pad
    wide = Experience(**{
        name: tensor if tensor.dim() == 1
        else pad(tensor, (3, 2)) if name in ("sequences", "attention_mask") else pad(tensor, (0, 2))
        for name, tensor in vars(experience).items()
    })  # fmt: skip
    outside = ~wide.response_mask
    for name in ("old_logprobs", "ref_logprobs", "values", "advantages", "returns", "rewards", "kl"):
        getattr(wide, name)[outside] = torch.nan
    wide.sequences[~wide.attention_mask] = 7
    engine = trainer.engine.policy if which == "policy" else trainer.engine.critic
    engine.eval()
    counts = StepCounts.of(experience)
    loss_of = {
        "policy": partial(trainer.policy_update.loss, kl_coef=trainer.kl_coef), "critic": trainer.critic_update.loss,
    }[which]  # fmt: skip
    results = []
    for part in (experience, wide):
        loss, _ = loss_of(part, counts)
        results.append((loss.detach(), gradients(engine, loss)))
    assert experience.response_mask.shape != wide.response_mask.shape
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
    assert any(gradient.abs().max() > 1e-3 for gradient in results[0][1])


def test_exactly_the_response_tokens_have_a_policy_gradient_including_the_eos(folder):
    trainer = make_trainer(folder, **PPO)
    experience = trainer.generate_experience(prompts_of(trainer))
    assert experience.ended.any()
    rows = torch.arange(len(experience))
    last = experience.response_mask.sum(1) - 1
    last_tokens = experience.sequences[:, -experience.response_mask.shape[1] :][rows, last]
    is_stop = torch.isin(last_tokens, torch.tensor(trainer.stop_ids))
    assert torch.equal(is_stop, experience.ended), "the last counted token is the EOS where there was one"
    for position in ("last", "after"):
        experience.advantages = torch.zeros_like(experience.advantages)
        if position == "last":
            experience.advantages[rows, last] = 1.0
        else:
            experience.advantages[~experience.response_mask] = 1.0
        loss, _ = trainer.policy_update.loss(experience, StepCounts(1.0, 1.0), kl_coef=trainer.kl_coef)
        result = gradients(trainer.engine.policy, loss)
        assert any(gradient.any() for gradient in result) == (position == "last")


def test_the_score_is_added_at_the_last_token_and_the_eos_penalty_to_truncated_responses_only(folder):
    trainers = [
        make_trainer(folder, kl_coef=0.0, reward_clip=clip, missing_eos_penalty=penalty)
        for clip, penalty in ((0.0, 0.0), (0.0, 2.0), (0.25, 2.0))
    ]
    bare, penalised, clipped = (trainer.generate_experience(prompts_of(trainer)) for trainer in trainers)
    rows, last = torch.arange(len(bare)), bare.response_mask.sum(1) - 1
    expected = torch.zeros_like(bare.rewards)
    expected[rows, last] = bare.scores
    torch.testing.assert_close(bare.rewards, expected)
    assert 0 < bare.ended.sum() < len(bare)
    expected[rows, last] -= torch.where(bare.ended, 0.0, 2.0)
    torch.testing.assert_close(penalised.rewards, expected)
    torch.testing.assert_close(penalised.scores, bare.scores)  # scores are reported as the reward model gave them
    assert (bare.scores.abs() > 0.25).any()
    # Clipping bounds the reward model's score, but not the penalty.
    expected[rows, last] = bare.scores.clip(-0.25, 0.25) - torch.where(bare.ended, 0.0, 2.0)
    torch.testing.assert_close(clipped.rewards, expected)


def test_responses_of_one_token_give_finite_numbers(folder):
    trainer = make_trainer(folder, **PPO, max_answer_seq_len=1)
    parts, metrics = one_iteration(trainer, QUESTIONS, minibatch_size=4, ppo_epochs=2)
    assert all(part.response_mask.shape == (4, 1) and part.response_mask.all() for part in parts)
    assert all(math.isfinite(value) for step in metrics for value in step.values())
    assert all(parameter.isfinite().all() for parameter in trainer.engine.policy.parameters())


def test_responses_depend_on_sample_ids_and_not_on_row_order_or_batch(folder):
    trainer = make_trainer(folder, max_answer_seq_len=12)

    def responses(questions: list[str], **names) -> list[str]:
        result = trainer.rollout(prompts_of(trainer, questions), **names)
        return [sample["response"] for sample in result.samples]

    twice = [QUESTIONS[0], QUESTIONS[1], QUESTIONS[0]]
    first, second, third = responses(twice, sample_ids=[4, 5, 6])
    assert first != third, "a repeated prompt gets two responses"
    assert responses(twice[::-1], sample_ids=[6, 5, 4]) == [third, second, first]
    assert responses(twice[:1], sample_ids=[4]) == [first]
    assert responses(twice[:1], sample_ids=[4], iteration=1) != [first]
    assert responses(twice[:1], sample_ids=[100]) == responses(twice[:1])  # without ids, the row's number


def test_the_update_minimises_the_unsupervised_loss_too_and_logs_it_separately(folder):
    trainer = make_trainer(folder, **PPO, unsup_coef=10.0, unsupervised_dataset_name="texts")
    ids = torch.arange(30, 42).reshape(2, 6)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 4:] = False
    loss_mask = mask.clone()
    loss_mask[:, 0] = False
    texts = [
        {"input_ids": ids[i : i + 1], "attention_mask": mask[i : i + 1], "loss_mask": loss_mask[i : i + 1]}
        for i in range(2)
    ]
    table = plain_models(folder)[0](ids, attention_mask=mask.long()).logits[:, :-1].log_softmax(-1)
    expected = -table.gather(2, ids[:, 1:, None])[..., 0][loss_mask[:, 1:]].mean()
    experience = trainer.generate_experience(prompts_of(trainer))
    minibatch = whitened(experience)
    first = trainer.train_rlhf(minibatch, texts)
    assert first["unsupervised_loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert first["policy_loss"] == pytest.approx(
        float(-minibatch.advantages[minibatch.response_mask].mean()), abs=1e-5
    )  # ρ = 1
    norm_without = make_trainer(folder, **PPO).train_rlhf(minibatch)["actor_grad_norm"]
    assert first["actor_grad_norm"] > 2 * norm_without, "its gradient is multiplied by unsup_coef"
    later = [trainer.train_rlhf(minibatch, texts)["unsupervised_loss"] for _ in range(3)]
    assert first["unsupervised_loss"] > later[0] > later[1] > later[2]


def test_judge_scores_are_logged_and_never_trained_on(folder):
    calls = []

    def judge(prompts, responses, rows):
        calls.append((prompts, responses, rows))
        return [-7.0 * row["number"] for row in rows]

    trainer, judged_trainer = make_trainer(folder, **PPO), make_trainer(folder, **PPO, judge=judge)
    plain, judged = (t.rollout(prompts_of(t)) for t in (trainer, judged_trainer))
    assert torch.equal(plain.experience.rewards, judged.experience.rewards)
    assert [sample["judge"] for sample in judged.samples] == [-7.0 * number for number in range(8)]
    assert [sample["judge"] for sample in plain.samples] == [None] * 8
    ((prompts, responses, rows),) = calls
    assert prompts == QUESTIONS and [row["number"] for row in rows] == list(range(8))
    assert responses == [sample["response"] for sample in judged.samples]
    assert [sample["row_index"] for sample in judged.samples] == list(range(100, 108))


def test_a_rollout_returns_its_own_timings(folder):
    trainer = make_trainer(folder)
    first, second = (trainer.rollout(prompts_of(trainer)).timings for _ in range(2))
    assert first["rollout"] > 0 and first["scoring"] > 0 and first["update"] == 0
    both = Timings(first, second)
    assert both["rollout"] == first["rollout"] + second["rollout"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_k": 40, "top_p": 0.9}])
def test_generate_of_transformers_gives_the_same_experience(folder, sampling):
    hybrid, plain = (
        make_trainer(folder, rollout_engine=name, max_answer_seq_len=12, **sampling)
        for name in ("hybrid", "transformers")
    )
    expected, actual = (trainer.rollout(prompts_of(trainer)) for trainer in (hybrid, plain))
    assert [s["response"] for s in actual.samples] == [s["response"] for s in expected.samples]
    expected, actual = expected.experience, actual.experience
    for name in vars(expected):
        torch.testing.assert_close(
            getattr(actual, name), getattr(expected, name), atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_ids_that_the_tokenizer_does_not_have_are_never_sampled(tmp_path):
    save_models(tmp_path, unknown_ids=200)
    with group_of_one():
        trainer = make_trainer(tmp_path, temperature=1.5)
        size = trainer.engine.policy.module.model.config.vocab_size
        assert trainer.vocabulary_size == len(trainer.tokenizer) == size - 200
        result = trainer.rollout(prompts_of(trainer), iteration=0)  # its check of log-probs allows for them
        assert int(result.experience.sequences.max()) < trainer.vocabulary_size
        trainer.train_rlhf(result.experience)
