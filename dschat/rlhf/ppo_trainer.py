"""Policy optimisation of an actor: experience, then updates."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from dschat.arguments import PPOArguments, RolloutArguments
from dschat.data.chat_template import decode_responses, stop_token_ids
from dschat.distributed import failpoint, watchdog
from dschat.distributed.engines import Metrics, optimizer_step
from dschat.distributed.launch import sum_over_ranks
from dschat.distributed.micro_batches import forward_in_micro_batches
from dschat.generation import Rollout, SamplingParams
from dschat.losses.sft import sft_loss
from dschat.losses.value import explained_variance, value_loss
from dschat.rewards.retry import Patience
from dschat.rewards.weighted_sum import Answers, Judge, Rewards, Scores, prompt_text
from dschat.rlhf.actor_loss import ActorLoss, StepCounts
from dschat.rlhf.advantages import kl_estimate, token_rewards
from dschat.rlhf.algorithms import estimate_advantages, shaped_scores
from dschat.rlhf.experience import Experience
from dschat.rlhf.rlhf_engine import DeepSpeedRLHFEngine
from dschat.rlhf.rollout_correction import gap_metrics, rollout_gap

Prompts = Mapping[str, list]  # of collate_prompts
ACTOR_METRICS = (
    "policy_loss", "clip_fraction", "dual_clip_fraction", "approx_kl", "ratio", "kl_loss", "entropy_bonus",
    "correction_weight", "correction_cut", "unsupervised_loss",
)  # fmt: skip


class DeepSpeedPPOTrainer:
    """`generate_experience`, then `train_rlhf`.

    Args:
        engine: the models.
        rollouts, ppo: settings of both halves.
        rewards: where scores come from.
        seed: of sampling.
        judge: scores that are watched and never trained on.

    Attributes:
        kl_coef: price of a nat of KL; --kl_target has it change between iterations.
        samples: prompt, response and scores of the newest rollout of this rank, for people to read.
        seconds: {"rollout", "scoring", "update"} since `take_seconds` was last called.
        note: is told of what an update computes, by name; see rlhf.dump.
        gap: with --old_logprobs rollout, what gap_metrics say of the first minibatch after the newest experience.
    """

    def __init__(self, engine: DeepSpeedRLHFEngine, *, rollouts: RolloutArguments, ppo: PPOArguments, rewards: Rewards,
                 seed: int, judge: Judge | None = None):  # fmt: skip
        self.engine, self.rollouts, self.ppo, self.seed, self.judge = engine, rollouts, ppo, seed, judge
        self.rewards, self.kl_coef = rewards, ppo.kl_coef
        self.tokenizer = engine.tokenizer
        self.stop_ids = stop_token_ids(self.tokenizer, engine.actor.engine.module.model.generation_config.eos_token_id)
        self.loss_of_actor = ActorLoss(ppo, max_tokens=rollouts.max_answer_seq_len)
        self.samples: list[dict[str, Any]] = []
        self.gap: dict[str, float] = {}
        self.note: Callable[[str, Tensor], None] | None = None
        self.seconds = {"rollout": 0.0, "scoring": 0.0, "update": 0.0}

    @torch.no_grad()
    def generate_experience(
        self, prompts: Prompts, *, iteration: int = 0, sample_ids: Sequence[int] | None = None, learn: bool = True
    ) -> Experience:
        """Roll out, score, shape rewards, estimate advantages. Every rank calls it with its own prompts.

        Args:
            iteration, sample_ids: name the random numbers of the responses to each prompt; an id is unique over the
                iteration's rollout, all ranks and batches together. Default: the rows' own numbers (a prompt that
                occurs twice then gets the same responses twice).
            learn: whether the moments that normalise rewards take in these scores; not those of a rank that joins in.

        Returns: num_samples_per_prompt rows for each prompt, one after the other.
        """
        ppo = self.ppo
        experience = self.observe(
            prompts, iteration=iteration, sample_ids=sample_ids, samples=ppo.num_samples_per_prompt, learn=learn,
            scale=True,
        )  # fmt: skip
        greedy = None
        if ppo.algorithm == "remax":
            greedy, known = self.greedy_scores(prompts)
            experience.trained &= known  # there is nothing to compare them with
        experience.advantages, experience.returns = estimate_advantages(experience, ppo=ppo, greedy_scores=greedy)
        return experience

    @torch.no_grad()
    def observe(
        self, prompts: Prompts, *, iteration: int, sample_ids: Sequence[int] | None = None, samples: int = 1,
        learn: bool = False, scale: bool = False,
    ) -> Experience:  # fmt: skip
        """Roll out, score, shape rewards: an experience whose advantages are still 0.

        Args:
            samples: responses to each prompt; the j-th of a prompt draws the numbers of sample_id · samples + j.
            learn, scale: of Rewards.score; evaluations neither change the moments nor are normalised.
        """
        ppo, self.gap = self.ppo, {}
        names = prompts["row_index"] if sample_ids is None else sample_ids
        prompts = {name: [value for value in values for _ in range(samples)] for name, values in prompts.items()}
        names = [name * samples + j for name in names for j in range(samples)]
        sampling = SamplingParams(self.rollouts.temperature, self.rollouts.top_k, self.rollouts.top_p)
        rollout = self.timed("rollout", lambda: self.roll_out(prompts, sampling, iteration=iteration, sample_ids=names))
        scored = self.timed("scoring", lambda: self.score(rollout, prompts, learn=learn, scale=scale))
        old_logprobs, entropy, ref_logprobs, values, scores = scored
        mask, kl = rollout.response_mask, None
        if ref_logprobs is not None:
            clip = ppo.kl_clip or None
            kl = kl_estimate(old_logprobs, ref_logprobs, ppo.kl_estimator, response_mask=mask, clip=clip)
        price = self.kl_coef if ppo.kl_in == "reward" and kl is not None else 0.0
        worth = self.worth(rollout, scores)
        rewards = token_rewards(worth, torch.zeros_like(old_logprobs) if kl is None else kl, mask, kl_coef=price)
        return Experience(
            sequences=rollout.sequences,
            attention_mask=rollout.attention_mask,
            response_mask=mask,
            rollout_logprobs=rollout.logprobs,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            entropy=entropy,
            values=values,
            scores=scores.total,
            known=scores.known,
            ended=rollout.ended,
            trained=scores.known & (rollout.ended | (not ppo.mask_truncated)),
            kl=kl,
            rewards=rewards,
            advantages=torch.zeros_like(rewards),
        )

    def greedy_scores(self, prompts: Prompts) -> tuple[Tensor, Tensor]:
        """[B] what the greedy response to each prompt is worth, ReMax's baseline, and [B] whether that is known.

        Both once for each sample of a prompt.
        """
        greedy = SamplingParams(temperature=0.0)
        rollout = self.timed("rollout", lambda: self.roll_out(prompts, greedy, iteration=0, sample_ids=None))
        scores = self.timed("scoring", lambda: self.rewards.score(rollout, self.answers(rollout, prompts), learn=False))
        times = self.ppo.num_samples_per_prompt
        return self.worth(rollout, scores).repeat_interleave(times), scores.known.repeat_interleave(times)

    def worth(self, rollout: Rollout, scores: Scores) -> Tensor:
        """[B] scores with everything that clips them or is taken off."""
        return shaped_scores(
            scores.total, rollout.ended, rollout.response_mask.sum(-1), ppo=self.ppo,
            max_tokens=self.rollouts.max_answer_seq_len,
        )  # fmt: skip

    def train_rlhf(
        self, minibatch: Experience, unsupervised: list[dict[str, Tensor]] | None = None, *, freeze_actor: bool = False
    ) -> dict[str, float]:
        """One optimizer step of the actor, and one of the critic where there is one.

        Args:
            minibatch: this rank's rows of the step; cut into micro-batches here.
            unsupervised: micro-batches of collate_sft for the pretraining loss, as many on every rank.
            freeze_actor: the critic alone.

        Returns: metrics of the whole step, the same on all ranks. Where no row of any rank has something to learn from
            nothing is updated: skipped_updates 0 and updates_without_signal 1. With --old_logprobs rollout the gap
            between decoder and actor too: of the first step after an experience, in which the weights are still those
            that sampled, and as it was there in the metrics of later steps.
        """
        return self.timed("update", lambda: self._train_rlhf(minibatch, unsupervised or [], freeze_actor))

    def _train_rlhf(
        self, minibatch: Experience, unsupervised: list[dict[str, Tensor]], freeze_actor: bool
    ) -> dict[str, float]:
        size = self.ppo.per_device_training_batch_size
        parts = [minibatch.rows(range(start, start + size)) for start in range(0, len(minibatch), size)]
        counts = StepCounts.of(minibatch)
        if not counts.tokens and not unsupervised:  # momentum alone must not move the models
            return {"skipped_updates": 0.0, "updates_without_signal": 1.0}
        metrics = {} if freeze_actor else self._step_of_actor(parts, unsupervised, counts)
        if self.engine.critic is not None:
            metrics = self._step_of_critic(parts, counts) | metrics
        skipped = max(metrics.pop(name, 0.0) for name in ("actor_skipped", "critic_skipped"))
        return metrics | {"skipped_updates": skipped}

    def _step_of_actor(
        self, parts: list[Experience], unsupervised: list[dict[str, Tensor]], counts: StepCounts
    ) -> dict[str, float]:
        texts = torch.zeros((), dtype=torch.long, device=self.engine.actor.engine.device)  # NCCL sums nothing else
        texts = float(sum_over_ranks(sum((batch["loss_mask"].sum() for batch in unsupervised), texts)))
        gaps = [] if self.ppo.old_logprobs == "rollout" and not self.gap else None
        actor = optimizer_step(
            self.engine.actor.engine,
            [partial(self.actor_loss, part, counts, gaps) for part in parts]
            + [partial(self.unsupervised_loss, batch, texts) for batch in unsupervised],
        )
        self.gap = gap_metrics(gaps) if gaps else self.gap
        self.engine.update_ema(self.engine.models.ema_decay)
        return {
            **{name: actor[name] for name in ACTOR_METRICS if name in actor},
            "actor_grad_norm": actor["grad_norm"],
            "actor_learning_rate": actor["learning_rate"],
            "actor_skipped": actor.get("skipped_updates", 0.0),
            **self.gap,
        }

    def _step_of_critic(self, parts: list[Experience], counts: StepCounts) -> dict[str, float]:
        critic = optimizer_step(self.engine.critic, [partial(self.critic_loss, part, counts) for part in parts])
        variance = explained_variance({name: torch.tensor(value) for name, value in critic.items()})
        return {
            "value_loss": critic["loss"],
            "explained_variance": float(variance),
            "value": critic["value_mean"],
            "critic_grad_norm": critic["grad_norm"],
            "critic_learning_rate": critic["learning_rate"],
            "critic_skipped": critic.get("skipped_updates", 0.0),
        }

    def actor_loss(
        self, part: Experience, counts: StepCounts, gaps: list[Metrics] | None = None
    ) -> tuple[Tensor, Metrics]:
        """The actor's loss of a micro-batch, and its metrics; a list of gaps gets the one to the decoder."""
        entropy = None
        logprobs = self.engine.actor.engine(
            part.sequences, part.attention_mask, part.loss_mask, self.rollouts.temperature,
            self.loss_of_actor.wants_entropy,
        )  # fmt: skip
        if self.loss_of_actor.wants_entropy:
            logprobs, entropy = logprobs
            entropy = _response(entropy, part.response_mask)
        logprobs = _response(logprobs, part.response_mask)
        self._note("logprobs", logprobs)
        if gaps is not None:
            gaps.append(rollout_gap(logprobs, part.rollout_logprobs, part.response_mask))
        loss, metrics = self.loss_of_actor(logprobs, entropy, part, counts, kl_coef=self.kl_coef)
        self._note("policy_loss", loss)
        return loss, metrics

    def critic_loss(self, part: Experience, counts: StepCounts) -> tuple[Tensor, Metrics]:
        values = _states(self.engine.critic(part.sequences, part.attention_mask), part.response_mask)
        loss, metrics = value_loss(
            values, part.values, part.returns, part.trained_mask,
            value_clip_range=self.ppo.value_clip_range, normalizer=counts.tokens,
        )  # fmt: skip
        self._note("values", values)
        self._note("value_loss", loss)
        return loss, metrics

    def _note(self, name: str, tensor: Tensor) -> None:
        if self.note is not None:
            self.note(name, tensor)

    def unsupervised_loss(self, batch: dict[str, Tensor], tokens: float) -> tuple[Tensor, Metrics]:
        logprobs = self.engine.actor.engine(batch["input_ids"], batch["attention_mask"], batch["loss_mask"])
        loss, _ = sft_loss(logprobs, batch["loss_mask"], normalizer=tokens)
        return self.ppo.unsup_coef * loss, {"unsupervised_loss": loss}

    def roll_out(
        self, prompts: Prompts, sampling: SamplingParams, *, iteration: int, sample_ids: Sequence[int] | None
    ) -> Rollout:
        """Sample one response to each prompt, as its sample id and nothing about ranks or order decides."""
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

    def score(
        self, rollout: Rollout, prompts: Prompts, *, learn: bool, scale: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Scores]:
        """old_logprobs, entropy, ref_logprobs, values [B, T] and the scores of a rollout; dropout is off.

        ref_logprobs and values are None where there is no such model.
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
        answers = self.answers(rollout, prompts)
        scores = self.rewards.score(rollout, answers, learn=learn, scale=scale)
        if failpoint.reached("scores"):
            scores.total.fill_(torch.nan)
        self.samples = self._samples(answers, prompts, scores)
        return old_logprobs, entropy, ref_logprobs, values, scores

    def answers(self, rollout: Rollout, prompts: Prompts) -> Answers:
        """The responses as reward sources see them."""
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
        """[B, T] what the ratio starts from, and entropies: of a forward pass without dropout, or of the decoder.

        Args:
            loss_mask: [B, P+T] bool, True on response tokens.
        """
        if self.ppo.old_logprobs == "rollout":
            return rollout.logprobs, -rollout.logprobs  # −log q of what q draws is its entropy, on average
        actor = self.engine.actor.engine
        actor.eval()
        logprobs, entropy = forward_in_micro_batches(
            actor, rollout.sequences, rollout.attention_mask, loss_mask, temperature=self.rollouts.temperature,
            with_entropy=True, micro_batch_size=self.ppo.per_device_training_batch_size,
        )  # [B, P+T]  # fmt: skip
        return _response(logprobs, rollout.response_mask), _response(entropy, rollout.response_mask)

    def timed(self, what: str, work: Callable[[], Any]) -> Any:
        """Run the work and add its seconds to those of the rollout, the scoring or the update."""
        watchdog.phase(what)
        failpoint.reached(what)
        start = time.perf_counter()
        result = work()
        get_accelerator().synchronize()
        self.seconds[what] += time.perf_counter() - start
        return result

    def take_seconds(self) -> dict[str, float]:
        """The seconds of each part since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return {f"seconds_{what}": value for what, value in taken.items()}

    def _samples(self, answers: Answers, prompts: Prompts, scores: Scores) -> list[dict[str, Any]]:
        opinions = [None] * len(answers)
        if self.judge:
            watchdog.phase("judging")
            patience = Patience(seconds=self.rollouts.judge_timeout, retries=self.rollouts.judge_retries)
            opinions = patience.opinions(self.judge, answers.messages, answers.responses, answers.rows)
        parts = {name: [None if x != x else x for x in part.tolist()] for name, part in scores.parts.items()}
        return [
            {
                "prompt": prompt_text(answers.messages[i]),
                "response": answers.responses[i],
                "score": score,
                "rewards": {name: part[i] for name, part in parts.items()},
                "judge": opinions[i],
                "ended": answers.ended[i],
                "row_index": prompts["row_index"][i],
            }
            for i, score in enumerate(scores.total.tolist())
        ]


def _response(per_token: Tensor, response_mask: Tensor) -> Tensor:
    """[B, P+T] → [B, T]: what is said of the response tokens."""
    return per_token[:, -response_mask.shape[1] :]


def _states(per_token: Tensor, response_mask: Tensor) -> Tensor:
    """[B, P+T] → [B, T]: what is said before each response token; its state ends at column P + t − 1."""
    return per_token[:, -response_mask.shape[1] - 1 : -1]
