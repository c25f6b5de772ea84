"""PPO and related algorithms: collect experience from rollouts, then update policy and critic."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dschat.arguments import PPOArguments, RolloutArguments
from dschat.data.chat_template import decode_responses, stop_token_ids
from dschat.distributed import failpoint, watchdog
from dschat.distributed.collectives import sum_over_ranks
from dschat.distributed.engines import Metrics, optimizer_step
from dschat.distributed.micro_batches import forward_in_micro_batches
from dschat.generation import Rollout, SamplingParams
from dschat.losses.sft import sft_loss
from dschat.losses.value import explained_variance, value_loss
from dschat.rewards.retry import RetryPolicy
from dschat.rewards.weighted_sum import Answers, Judge, Rewards, Scores, prompt_text
from dschat.rlhf.actor_loss import ActorLoss, StepCounts
from dschat.rlhf.advantages import kl_estimate, token_rewards
from dschat.rlhf.algorithms import ALGORITHMS, EstimatorInputs
from dschat.rlhf.experience import Experience
from dschat.rlhf.rlhf_engine import DeepSpeedRLHFEngine
from dschat.rlhf.rollout_correction import mismatch_metrics, rollout_logprob_mismatch
from dschat.rlhf.rollout_result import RolloutResult, Timings
from dschat.rlhf.score_shaping import shaped_scores

Prompts = Mapping[str, list]  # of collate_prompts
Record = Callable[[str, Tensor], None]
OF_ENGINE = ("loss", "grad_norm", "learning_rate", "skipped_updates")  # what optimizer_step adds to a loss's metrics


class DeepSpeedPPOTrainer:
    """Collects experience (`rollout`, `generate_experience`) and updates policy and critic (`train_rlhf`).

    Results are returned, never stored on the trainer.

    Args:
        engine: the models.
        rollouts, ppo: settings of generation and of the updates.
        rewards: scores the responses.
        seed: seed of sampling.
        judge: computes scores that are logged but never trained on.

    Attributes:
        kl_coef: coefficient of the KL penalty; --kl_target adapts it between iterations.
    """

    def __init__(self, engine: DeepSpeedRLHFEngine, *, rollouts: RolloutArguments, ppo: PPOArguments, rewards: Rewards,
                 seed: int, judge: Judge | None = None):  # fmt: skip
        self.engine, self.rollouts, self.ppo, self.seed, self.judge = engine, rollouts, ppo, seed, judge
        self.rewards, self.kl_coef = rewards, ppo.kl_coef
        self.tokenizer = engine.tokenizer
        self.stop_ids = stop_token_ids(self.tokenizer, engine.policy.module.model.generation_config.eos_token_id)
        self.policy_objective = ActorLoss(ppo, max_tokens=rollouts.max_answer_seq_len)

    def generate_experience(self, prompts: Prompts, **options: Any) -> Experience:
        """Call `rollout` and return only its experience."""
        return self.rollout(prompts, **options).experience

    @torch.no_grad()
    def rollout(
        self, prompts: Prompts, *, iteration: int = 0, sample_ids: Sequence[int] | None = None, learn: bool = True
    ) -> RolloutResult:
        """Roll out, score, shape rewards, estimate advantages. A collective; every rank passes its own prompts.

        Args:
            iteration, sample_ids: counters of the random numbers that sample the responses to each prompt; an id is
                unique over the iteration's rollout, all ranks and batches together. Default: the row indices (a
                duplicated prompt then gets identical responses).
            learn: whether these scores update the running moments of reward normalisation; False on a rank that only
                takes part in the collectives.

        Returns: num_samples_per_prompt rows for each prompt, one after the other.
        """
        ppo = self.ppo
        result = self.rollout_and_score(
            prompts, iteration=iteration, sample_ids=sample_ids, samples=ppo.num_samples_per_prompt, learn=learn,
            scale=True,
        )  # fmt: skip
        experience, greedy = result.experience, None
        if ALGORITHMS[ppo.algorithm].greedy_baseline:
            greedy, has_score = self.greedy_scores(prompts, result.timings)
            experience.trained &= has_score  # a response without a baseline has no advantage
        experience.advantages, experience.returns = estimate_advantages(experience, ppo=ppo, greedy_scores=greedy)
        return result

    @torch.no_grad()
    def rollout_and_score(
        self, prompts: Prompts, *, iteration: int, sample_ids: Sequence[int] | None = None, samples: int = 1,
        learn: bool = False, scale: bool = False,
    ) -> RolloutResult:  # fmt: skip
        """Roll out, score, shape rewards; the advantages of the returned experience are still 0.

        Args:
            samples: responses per prompt; response j is sampled with the sample id sample_id · samples + j.
            learn, scale: as in Rewards.score; evaluation neither updates the moments nor normalises scores.
        """
        ppo, timings = self.ppo, Timings()
        names = prompts["row_index"] if sample_ids is None else sample_ids
        prompts = {name: [value for value in values for _ in range(samples)] for name, values in prompts.items()}
        names = [name * samples + j for name in names for j in range(samples)]
        sampling = SamplingParams(self.rollouts.temperature, self.rollouts.top_k, self.rollouts.top_p)
        with timings.measure("rollout"):
            rollout = self.generate(prompts, sampling, iteration=iteration, sample_ids=names)
        with timings.measure("scoring"):
            answers = self.answers(rollout, prompts)
            old_logprobs, entropy, ref_logprobs, values = self.score_tokens(rollout)
            scores = self.rewards.score(rollout, answers, learn=learn, scale=scale)
            if failpoint.reached("scores"):
                scores.total.fill_(torch.nan)
            readable = self._samples(answers, prompts, scores)
        mask, kl, kl_coef = rollout.response_mask, None, 0.0
        if ref_logprobs is not None:
            clip = ppo.kl_clip or None
            kl = kl_estimate(old_logprobs, ref_logprobs, ppo.kl_estimator, response_mask=mask, clip=clip)
            kl_coef = self.kl_coef if ppo.kl_in == "reward" else 0.0
        penalty = torch.zeros_like(old_logprobs) if kl is None else kl
        rewards = token_rewards(self.shaped_scores(rollout, scores), penalty, mask, kl_coef=kl_coef)
        experience = Experience(
            sequences=rollout.sequences,
            attention_mask=rollout.attention_mask,
            response_mask=mask,
            rollout_logprobs=rollout.logprobs,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            entropy=entropy,
            values=values,
            scores=scores.total,
            has_score=scores.has_score,
            ended=rollout.ended,
            trained=scores.has_score & (rollout.ended | (not ppo.mask_truncated)),
            kl=kl,
            rewards=rewards,
            advantages=torch.zeros_like(rewards),
        )
        recomputed = ppo.old_logprobs == "recompute"
        mismatch = rollout_logprob_mismatch(old_logprobs, rollout.logprobs, mask) if recomputed else {}
        return RolloutResult(experience, readable, timings, mismatch)

    def greedy_scores(self, prompts: Prompts, timings: Timings) -> tuple[Tensor, Tensor]:
        """ReMax's baseline: [B] shaped scores of each prompt's greedy response, and [B] bool, whether it has a score.

        Both are repeated for each sample of a prompt. Updates `timings`.
        """
        with timings.measure("rollout"):
            rollout = self.generate(prompts, SamplingParams(temperature=0.0), iteration=0, sample_ids=None)
        with timings.measure("scoring"):
            scores = self.rewards.score(rollout, self.answers(rollout, prompts), learn=False)
        times = self.ppo.num_samples_per_prompt
        shaped = self.shaped_scores(rollout, scores)
        return shaped.repeat_interleave(times), scores.has_score.repeat_interleave(times)

    def shaped_scores(self, rollout: Rollout, scores: Scores) -> Tensor:
        """[B] scores after clipping and penalties."""
        ppo = self.ppo
        return shaped_scores(
            scores.total, rollout.ended, rollout.response_mask.sum(-1), reward_clip=ppo.reward_clip,
            missing_eos_penalty=ppo.missing_eos_penalty, overlong_buffer=ppo.overlong_buffer,
            overlong_factor=ppo.overlong_factor, max_tokens=self.rollouts.max_answer_seq_len,
        )  # fmt: skip

    def train_rlhf(
        self, minibatch: Experience, unsupervised: Sequence[dict[str, Tensor]] = (), *, freeze_actor: bool = False,
        measure_mismatch: bool = False, record: Record | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """One optimizer step of the policy, and one of the critic where there is one.

        Args:
            minibatch: this rank's rows of the step; split into micro-batches here.
            unsupervised: micro-batches of collate_sft for the pretraining loss, equally many on every rank.
            freeze_actor: update only the critic.
            measure_mismatch: whether to log the log-prob mismatch between rollout engine and policy (see
                rollout_correction.mismatch_metrics); the policy must still have the weights that sampled.
            record: callback that receives the tensors the losses compute, by name; see update_dump.

        Returns: metrics of the whole step, the same on all ranks. If no rank has a token to train on, no model is
            updated: skipped_updates is 0 and updates_without_signal 1.
        """
        size = self.ppo.per_device_training_batch_size
        parts = [minibatch.rows(range(start, start + size)) for start in range(0, len(minibatch), size)]
        counts = StepCounts.of(minibatch)
        if not counts.tokens and not unsupervised:  # no optimizer step: Adam's momentum would update the weights
            return {"skipped_updates": 0.0, "updates_without_signal": 1.0}
        metrics: dict[str, float] = {}
        if not freeze_actor:
            metrics = self._step_of_policy(parts, unsupervised, counts, measure_mismatch, record)
        if self.engine.critic is not None:
            metrics = self._step_of_critic(parts, counts, record) | metrics
        skipped = max(metrics.pop(name, 0.0) for name in ("actor_skipped", "critic_skipped"))
        return metrics | {"skipped_updates": skipped}

    def _step_of_policy(
        self, parts: list[Experience], unsupervised: Sequence[dict[str, Tensor]], counts: StepCounts,
        measure_mismatch: bool, record: Record | None,
    ) -> dict[str, float]:  # fmt: skip
        texts = torch.zeros((), dtype=torch.long, device=self.engine.policy.device)  # NCCL reduces device tensors only
        texts = float(sum_over_ranks(sum((batch["loss_mask"].sum() for batch in unsupervised), texts)))
        mismatches: list[Metrics] | None = [] if measure_mismatch else None
        step = optimizer_step(
            self.engine.policy,
            [partial(self.policy_loss, part, counts, mismatches, record) for part in parts]
            + [partial(self.unsupervised_loss, batch, texts) for batch in unsupervised],
        )
        self.engine.update_ema(self.engine.models.ema_decay)
        return {
            **{name: value for name, value in step.items() if name not in OF_ENGINE},
            "actor_grad_norm": step["grad_norm"],
            "actor_learning_rate": step["learning_rate"],
            "actor_skipped": step.get("skipped_updates", 0.0),
            **(mismatch_metrics(mismatches) if mismatches else {}),
        }

    def _step_of_critic(
        self, parts: list[Experience], counts: StepCounts, record: Record | None
    ) -> dict[str, float]:
        step = optimizer_step(self.engine.critic, [partial(self.critic_loss, part, counts, record) for part in parts])
        variance = explained_variance({name: torch.tensor(value) for name, value in step.items()})
        return {
            **{name: value for name, value in step.items() if name not in OF_ENGINE},
            "value_loss": step["loss"],
            "explained_variance": float(variance),
            "critic_grad_norm": step["grad_norm"],
            "critic_learning_rate": step["learning_rate"],
            "critic_skipped": step.get("skipped_updates", 0.0),
        }

    def policy_loss(
        self, part: Experience, counts: StepCounts, mismatches: list[Metrics] | None = None,
        record: Record | None = None,
    ) -> tuple[Tensor, Metrics]:  # fmt: skip
        """Policy loss of a micro-batch and its metrics; appends the rollout log-prob mismatch to `mismatches`."""
        entropy, with_entropy = None, self.policy_objective.wants_entropy
        logprobs = self.engine.policy(
            part.sequences, part.attention_mask, part.loss_mask, self.rollouts.temperature, with_entropy
        )
        if with_entropy:
            logprobs, entropy = logprobs
            entropy = _response(entropy, part.response_mask)
        logprobs = _response(logprobs, part.response_mask)
        if mismatches is not None:
            mismatches.append(rollout_logprob_mismatch(logprobs, part.rollout_logprobs, part.response_mask))
        loss, metrics = self.policy_objective(logprobs, entropy, part, counts, kl_coef=self.kl_coef)
        if record is not None:
            record("logprobs", logprobs)
            record("policy_loss", loss)
        return loss, metrics

    def critic_loss(
        self, part: Experience, counts: StepCounts, record: Record | None = None
    ) -> tuple[Tensor, Metrics]:
        """Value loss of a micro-batch and its metrics."""
        values = _states(self.engine.critic(part.sequences, part.attention_mask), part.response_mask)
        loss, metrics = value_loss(
            values, part.values, part.returns, part.trained_mask,
            value_clip_range=self.ppo.value_clip_range, normalizer=counts.tokens,
        )  # fmt: skip
        if record is not None:
            record("values", values)
            record("value_loss", loss)
        return loss, metrics

    def unsupervised_loss(self, batch: dict[str, Tensor], tokens: float) -> tuple[Tensor, Metrics]:
        logprobs = self.engine.policy(batch["input_ids"], batch["attention_mask"], batch["loss_mask"])
        loss, _ = sft_loss(logprobs, batch["loss_mask"], normalizer=tokens)
        return self.ppo.unsup_coef * loss, {"unsupervised_loss": loss}

    def generate(
        self, prompts: Prompts, sampling: SamplingParams, *, iteration: int, sample_ids: Sequence[int] | None
    ) -> Rollout:
        """Sample one response to each prompt; it depends on the sample id, not on ranks or batch order."""
        actor = self.engine.actor
        with actor.generation():
            return actor.generate(
                prompts["prompts"],
                max_new_tokens=self.rollouts.max_answer_seq_len,
                eos_token_ids=self.stop_ids,
                pad_token_id=self.tokenizer.pad_token_id,
                sampling=sampling,
                seed=self.seed,
                iteration=iteration,
                sample_ids=None if sample_ids is None else torch.tensor(sample_ids),
            )

    def score_tokens(self, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Compute old_logprobs, entropy, ref_logprobs, values [B, T] of a rollout, with dropout off.

        ref_logprobs is None without a reference model, values without a critic.
        """
        engine, mask = self.engine, rollout.response_mask
        ids, attended = rollout.sequences, rollout.attention_mask
        loss_mask = torch.nn.functional.pad(mask, (rollout.prompt_length, 0))
        old_logprobs, entropy = self.old_logprobs(rollout, loss_mask)
        ref_logprobs = values = None
        size = self.ppo.per_device_training_batch_size
        if engine.ref is not None:
            ref_logprobs = forward_in_micro_batches(
                engine.ref, ids, attended, loss_mask, temperature=self.rollouts.temperature, micro_batch_size=size
            )
            ref_logprobs = _response(ref_logprobs, mask)
        if engine.critic is not None:
            engine.critic.eval()
            values = _states(forward_in_micro_batches(engine.critic, ids, attended, micro_batch_size=size), mask)
        return old_logprobs, entropy, ref_logprobs, values

    def answers(self, rollout: Rollout, prompts: Prompts) -> Answers:
        """The responses in the form that reward sources take."""
        token_ids = [list(ids) for ids in rollout.responses()]
        return Answers(
            messages=prompts["messages"],
            responses=decode_responses(self.tokenizer, token_ids),
            token_ids=token_ids,
            rows=prompts["rows"],
            ended=rollout.ended.tolist(),
            max_tokens=self.rollouts.max_answer_seq_len,
        )

    def old_logprobs(self, rollout: Rollout, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T] old log-probs and entropies, from a forward pass without dropout or from the decoder.

        Args:
            loss_mask: [B, P+T] bool, True on response tokens.
        """
        if self.ppo.old_logprobs == "rollout":
            return rollout.logprobs, -rollout.logprobs  # E[−log q] over samples of q is its entropy
        policy = self.engine.policy
        policy.eval()
        logprobs, entropy = forward_in_micro_batches(
            policy, rollout.sequences, rollout.attention_mask, loss_mask, temperature=self.rollouts.temperature,
            with_entropy=True, micro_batch_size=self.ppo.per_device_training_batch_size,
        )  # [B, P+T]  # fmt: skip
        return _response(logprobs, rollout.response_mask), _response(entropy, rollout.response_mask)

    def _samples(self, answers: Answers, prompts: Prompts, scores: Scores) -> list[dict[str, Any]]:
        judge_scores = [None] * len(answers)
        if self.judge:
            watchdog.phase("judging")
            retry_policy = RetryPolicy(seconds=self.rollouts.judge_timeout, retries=self.rollouts.judge_retries)
            judge_scores = retry_policy.judge_scores(self.judge, answers.messages, answers.responses, answers.rows)
        parts = {name: [None if x != x else x for x in part.tolist()] for name, part in scores.parts.items()}
        return [
            {
                "prompt": prompt_text(answers.messages[i]),
                "response": answers.responses[i],
                "score": score,
                "rewards": {name: part[i] for name, part in parts.items()},
                "judge": judge_scores[i],
                "ended": answers.ended[i],
                "row_index": prompts["row_index"][i],
            }
            for i, score in enumerate(scores.total.tolist())
        ]


def _response(per_token: Tensor, response_mask: Tensor) -> Tensor:
    """[B, P+T] → [B, T]: the columns of the response tokens."""
    return per_token[:, -response_mask.shape[1] :]


def _states(per_token: Tensor, response_mask: Tensor) -> Tensor:
    """[B, P+T] → [B, T]: the column before each response token; the state before token t ends at column P + t − 1."""
    return per_token[:, -response_mask.shape[1] - 1 : -1]


def estimate_advantages(
    experience: Experience, *, ppo: PPOArguments, greedy_scores: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute advantages [B, T], not whitened yet, and the critic's returns [B, T] (None without a critic).

    Args:
        experience: must have rewards, and values if there is a critic.
        greedy_scores: [B] shaped score of the greedy response to each row's prompt, for a greedy baseline.
    """
    return ALGORITHMS[ppo.algorithm].estimate(
        EstimatorInputs(
            rewards=experience.rewards, response_mask=experience.response_mask, values=experience.values,
            has_score=experience.has_score, greedy_scores=greedy_scores, group_size=ppo.num_samples_per_prompt,
            gamma=ppo.gamma, gae_lambda=ppo.gae_lambda,
        )
    )  # fmt: skip
