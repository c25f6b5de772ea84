"""PPO and related algorithms: collect experience from rollouts, then update policy and critic."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dschat.arguments import PPOArguments, RolloutArguments
from dschat.data.chat_template import decode_responses, stop_token_ids
from dschat.distributed import failpoint, watchdog
from dschat.generation import Rollout, SamplingParams
from dschat.models.loading import may_drop
from dschat.models.tokenizer import id_limit
from dschat.rewards.retry import RetryPolicy
from dschat.rewards.weighted_sum import Judge, ResponseBatch, Rewards, Scores
from dschat.rlhf.advantages import kl_estimate, token_rewards
from dschat.rlhf.algorithms import ALGORITHMS
from dschat.rlhf.experience import Experience, estimate_advantages
from dschat.rlhf.rlhf_engine import DeepSpeedRLHFEngine
from dschat.rlhf.rollouts.engine_check import EngineCheck
from dschat.rlhf.rollouts.logprob_mismatch import rollout_logprob_mismatch
from dschat.rlhf.rollouts.model_outputs import ModelOutputs, OldLogprobs, compute_model_outputs
from dschat.rlhf.rollouts.result import RolloutResult, Timings, sample_records
from dschat.rlhf.rollouts.score_shaping import ScoreShaping
from dschat.rlhf.updates.critic_update import CriticUpdate
from dschat.rlhf.updates.optimizer_steps import Record, StepCounts, discard, sequences_of, trained_rows
from dschat.rlhf.updates.policy_update import PolicyUpdate
from dschat.runs.throughput import Work, trained_model

Prompts = Mapping[str, list]  # as returned by collate_prompts; is_chat may be left out


class DeepSpeedPPOTrainer:
    """Collects experience (`rollout`, `generate_experience`) and updates policy and critic (`train_rlhf`).

    Results are returned, never stored on the trainer.

    Args:
        engine: the models.
        rollouts, ppo: settings of generation and of the updates.
        rewards: scores the responses.
        seed: seed of sampling.
        judge: computes scores that are logged but never trained on.
        updates_per_rollout: if there is only one, its forward passes also give the old log-probs and values, unless
            they are needed earlier or depend on dropout; then rollouts have none (see Experience). None: unknown.

    Attributes:
        kl_coef: coefficient of the KL penalty; --kl_target adapts it between iterations.
        trained_models: what determines the work of an update.
        engine_check: compares the log-probs of rollout engine and policy.
        policy_update, critic_update: the losses and optimizer steps of the two models.
    """

    def __init__(self, engine: DeepSpeedRLHFEngine, *, rollouts: RolloutArguments, ppo: PPOArguments, rewards: Rewards,
                 seed: int, judge: Judge | None = None, updates_per_rollout: int | None = None):  # fmt: skip
        self.engine, self.rollouts, self.ppo, self.seed, self.judge = engine, rollouts, ppo, seed, judge
        self.rewards, self.kl_coef = rewards, ppo.kl_coef
        self.tokenizer = engine.tokenizer
        self.vocabulary_size = id_limit(self.tokenizer)
        self.stop_ids = stop_token_ids(self.tokenizer, engine.policy.module.model.generation_config.eos_token_id)
        self.score_shaping = ScoreShaping(
            reward_clip=ppo.reward_clip, missing_eos_penalty=ppo.missing_eos_penalty,
            overlong_buffer=ppo.overlong_buffer, overlong_factor=ppo.overlong_factor,
            max_tokens=rollouts.max_answer_seq_len,
        )  # fmt: skip
        self.updates_per_rollout = updates_per_rollout
        self.policy_may_drop = may_drop(engine.policy.module.model)
        self.critic_may_drop = engine.critic is not None and may_drop(engine.critic.module.model)
        self.trained_models = {
            name: trained_model(model, engine.limit_of(model)) for name, model in engine.trained.items()
        }
        model = engine.policy.module.model
        self.engine_check = EngineCheck(
            every=rollouts.check_rollouts_every, dtype=model.dtype, sampling=self.sampling,
            vocabulary=model.config.get_text_config().vocab_size, same_weights=engine.actor.capabilities.same_weights,
        )  # fmt: skip
        self.policy_update = PolicyUpdate(engine, rollouts=rollouts, ppo=ppo)
        self.critic_update = CriticUpdate(engine, ppo=ppo)

    def generate_experience(self, prompts: Prompts, **options: Any) -> Experience:
        """Call `rollout` and return only its experience."""
        return self.rollout(prompts, **options).experience

    @torch.no_grad()
    def rollout(
        self, prompts: Prompts, *, iteration: int = 0, sample_ids: Sequence[int] | None = None,
        update_moments: bool = True,
    ) -> RolloutResult:  # fmt: skip
        """Roll out, score, shape rewards, estimate advantages. A collective; every rank passes its own prompts.

        Args:
            iteration, sample_ids: with the seed they determine the random numbers of each prompt's responses; an id is
                unique over the iteration's rollout, all ranks and batches together. Default: the row indices (a
                duplicated prompt then gets identical responses).
            update_moments: whether these scores update the running moments of reward normalisation; False on a rank
                that only takes part in the collectives.

        Returns: num_samples_per_prompt consecutive rows for each prompt.
        """
        result = self.rollout_and_score(
            prompts, iteration=iteration, sample_ids=sample_ids, samples=self.ppo.num_samples_per_prompt,
            update_moments=update_moments, normalize=True, old_logprobs=self.old_logprobs,
            with_values=not self.update_gives_values,
        )  # fmt: skip
        experience, greedy = result.experience, None
        if not self.sampling.greedy and self.engine_check.is_due(iteration):
            self.engine_check.check_experience(self.engine, experience, self.ppo.old_logprobs, iteration=iteration)
        if ALGORITHMS[self.ppo.algorithm].greedy_baseline:
            greedy, has_score = self.greedy_scores(prompts, result.timings)
            experience.trained &= has_score  # a response without a baseline has no advantage
        if not self.update_gives_values:
            estimates = estimate_advantages(experience, ppo=self.ppo, greedy_scores=greedy)
            experience.advantages, experience.returns = estimates
        return result

    @torch.no_grad()
    def rollout_and_score(
        self, prompts: Prompts, *, iteration: int, sample_ids: Sequence[int] | None = None, samples: int = 1,
        update_moments: bool = False, normalize: bool = False, old_logprobs: OldLogprobs | None = None,
        with_values: bool = False,
    ) -> RolloutResult:  # fmt: skip
        """Roll out, score, shape rewards; the returned experience has no advantages yet.

        Args:
            samples: responses per prompt; response j is sampled with the sample id sample_id · samples + j.
            update_moments, normalize: as in Rewards.score; evaluation does neither.
            old_logprobs: where they come from; None: --old_logprobs.
            with_values: whether the critic runs, if there is one.
        """
        timings = Timings()
        sample_ids = prompts["row_index"] if sample_ids is None else sample_ids
        sample_ids = [sample_id * samples + j for sample_id in sample_ids for j in range(samples)]
        prompts = {name: [value for value in values for _ in range(samples)] for name, values in prompts.items()}
        with timings.measure("rollout"):
            rollout = self.generate(prompts, self.sampling, iteration=iteration, sample_ids=sample_ids)
        with timings.measure("scoring"):
            batch = self.response_batch(rollout, prompts)
            pending = self.rewards.start(batch)  # reward functions and services run while the models do
            outputs = self.model_outputs(rollout, old_logprobs or self.ppo.old_logprobs, with_values=with_values)
            scores = self.rewards.score(
                rollout, batch, pending=pending, update_moments=update_moments, normalize=normalize
            )
            if failpoint.reached("scores"):
                scores.total.fill_(torch.nan)
            records = sample_records(
                batch, scores, row_index=prompts["row_index"], judge_scores=self.judge_scores(batch)
            )
        experience = self.experience(rollout, outputs, scores)
        mismatch = {}
        if self.ppo.old_logprobs == "recompute" and outputs.old_logprobs is not None:
            mismatch = rollout_logprob_mismatch(outputs.old_logprobs, rollout.logprobs, rollout.response_mask)
        return RolloutResult(experience, records, timings, mismatch)

    def train_rlhf(
        self, minibatch: Experience, unsupervised: Sequence[dict[str, Tensor]] = (), *, freeze_actor: bool = False,
        measure_mismatch: bool = False, record: Record = discard,
    ) -> dict[str, float]:  # fmt: skip
        """One optimizer step of the policy, and one of the critic where there is one.

        Args:
            minibatch: this rank's rows of the step; split into micro-batches here. Gets the advantages that it lacks.
            unsupervised: micro-batches of collate_sft for the pretraining loss, equally many on every rank.
            freeze_actor: update only the critic.
            measure_mismatch: whether to log the log-prob mismatch between rollout engine and policy (see
                logprob_mismatch.mismatch_metrics); the policy must still have the weights of the rollout.
            record: callback that receives the tensors the losses compute, by name; see update_dump.

        Returns: metrics of the whole step, the same on all ranks. If no rank has a token to train on, no model is
            updated: skipped_updates is 0 and updates_without_signal 1.
        """
        counts = StepCounts.of(minibatch)
        if not counts.tokens and not unsupervised:  # no optimizer step: Adam's momentum would update the weights
            return {"skipped_updates": 0.0, "updates_without_signal": 1.0}
        metrics: dict[str, float] = {}
        if self.engine.critic is not None:  # first: its values may give the advantages
            metrics = self.critic_update.step(minibatch, counts, record=record)
        if not freeze_actor:
            metrics |= self.policy_update.step(
                minibatch, unsupervised, counts, kl_coef=self.kl_coef, measure_mismatch=measure_mismatch,
                record=record,
            )  # fmt: skip
        skipped = max(metrics.pop(name, 0.0) for name in ("actor_skipped", "critic_skipped"))
        return metrics | {"skipped_updates": skipped}

    def update_work(self, minibatch: Experience, *, freeze_actor: bool = False) -> Work:
        """Work of train_rlhf on this rank; texts of the pretraining loss are not counted."""
        _, rows = trained_rows(minibatch)
        models = (model for name, model in self.trained_models.items() if not (freeze_actor and name == "actor"))
        return sum((model.work(sequences_of(rows, model.limit)) for model in models), Work())

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            self.rollouts.temperature, self.rollouts.top_k, self.rollouts.top_p, vocabulary_size=self.vocabulary_size
        )

    def generate(
        self, prompts: Prompts, sampling: SamplingParams, *, iteration: int, sample_ids: Sequence[int] | None
    ) -> Rollout:
        """Sample one response to each prompt; it depends on the sample id, not on ranks or batch order."""
        with self.engine.generation() as actor:
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

    def response_batch(self, rollout: Rollout, prompts: Prompts) -> ResponseBatch:
        """The prompts and responses as inputs of the reward sources."""
        token_ids = [list(ids) for ids in rollout.responses()]
        return ResponseBatch(
            messages=prompts["messages"],
            responses=decode_responses(self.tokenizer, token_ids),
            token_ids=token_ids,
            rows=prompts["rows"],
            ended=rollout.ended.tolist(),
            max_tokens=self.rollouts.max_answer_seq_len,
            is_chat=prompts.get("is_chat", []),
        )

    @property
    def old_logprobs(self) -> OldLogprobs:
        """Where the old log-probs of a rollout come from that is trained on."""
        ppo = self.ppo
        kl_in_reward = ppo.needs_reference and ppo.kl_in == "reward"
        needed_earlier = self.updates_per_rollout != 1 or kl_in_reward or ppo.actor_freeze_steps
        if ppo.old_logprobs == "rollout" or needed_earlier:
            return ppo.old_logprobs
        return "recompute" if self.policy_may_drop else "update"

    @property
    def update_gives_values(self) -> bool:
        """Whether the only update on a rollout computes the critic's values, and so the advantages."""
        return self.engine.critic is not None and self.updates_per_rollout == 1 and not self.critic_may_drop

    def model_outputs(
        self, rollout: Rollout, old_logprobs: OldLogprobs = "recompute", *, with_values: bool = True
    ) -> ModelOutputs:
        """Log-probs and values of the rollout under the current models."""
        return compute_model_outputs(
            self.engine, rollout, old_logprobs=old_logprobs, with_values=with_values,
            temperature=self.rollouts.temperature,
        )  # fmt: skip

    def judge_scores(self, batch: ResponseBatch) -> list[float | None]:
        """The judge's score of each response; None where it returned none, and without a judge."""
        if self.judge is None:
            return [None] * len(batch)
        watchdog.phase("judging")
        retry_policy = RetryPolicy(seconds=self.rollouts.judge_timeout, retries=self.rollouts.judge_retries)
        return retry_policy.judge_scores(self.judge, batch.messages, batch.responses, batch.rows)

    def shaped_scores(self, rollout: Rollout, scores: Scores) -> Tensor:
        """[B] scores after clipping and penalties."""
        return self.score_shaping.shaped_scores(
            scores.total, ended=rollout.ended, lengths=rollout.response_mask.sum(-1)
        )

    def greedy_scores(self, prompts: Prompts, timings: Timings) -> tuple[Tensor, Tensor]:
        """ReMax's baseline: [B] shaped scores of each prompt's greedy response, and [B] bool, whether it has a score.

        Both are repeated for each sample of a prompt. Updates `timings`.
        """
        with timings.measure("rollout"):
            rollout = self.generate(prompts, replace(self.sampling, temperature=0.0), iteration=0, sample_ids=None)
        with timings.measure("scoring"):
            scores = self.rewards.score(rollout, self.response_batch(rollout, prompts), update_moments=False)
        samples = self.ppo.num_samples_per_prompt
        shaped = self.shaped_scores(rollout, scores)
        return shaped.repeat_interleave(samples), scores.has_score.repeat_interleave(samples)

    def experience(self, rollout: Rollout, outputs: ModelOutputs, scores: Scores) -> Experience:
        """Build the Experience of a rollout, with KL and token rewards, without advantages."""
        ppo, mask, kl, kl_coef = self.ppo, rollout.response_mask, None, 0.0
        if outputs.ref_logprobs is not None and outputs.old_logprobs is not None:
            kl = kl_estimate(
                outputs.old_logprobs, outputs.ref_logprobs, ppo.kl_estimator, response_mask=mask,
                clip=ppo.kl_clip or None,
            )  # fmt: skip
            kl_coef = self.kl_coef if ppo.kl_in == "reward" else 0.0
        penalty = torch.zeros_like(rollout.logprobs) if kl is None else kl
        rewards = token_rewards(self.shaped_scores(rollout, scores), penalty, mask, kl_coef=kl_coef)
        return Experience(
            sequences=rollout.sequences,
            attention_mask=rollout.attention_mask,
            response_mask=mask,
            rollout_logprobs=rollout.logprobs,
            **vars(outputs),
            scores=scores.total,
            has_score=scores.has_score,
            ended=rollout.ended,
            trained=scores.has_score & (rollout.ended | (not ppo.mask_truncated)),
            kl=kl,
            rewards=rewards,
        )
