"""Proximal policy optimisation from a reward model: experience, then updates."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from dschat import failpoint, watchdog
from dschat.arguments import PPOArguments, RolloutArguments
from dschat.data.chat_template import decode_responses, stop_token_ids
from dschat.engines import Metrics, optimizer_step
from dschat.generation import Rollout, SamplingParams
from dschat.launch import sum_over_ranks
from dschat.rlhf.advantages import gae, kl_estimate, token_rewards
from dschat.rlhf.experience import Experience
from dschat.rlhf.losses import explained_variance, policy_loss, sft_loss, value_loss
from dschat.rlhf.off_policy import gap_metrics, rollout_gap, truncated_weights
from dschat.rlhf.patience import Patience
from dschat.rlhf.rewards import Judge, RewardModel, prompt_text
from dschat.rlhf.rlhf_engine import DeepSpeedRLHFEngine

Prompts = Mapping[str, list]  # of collate_prompts
ACTOR_METRICS = (
    "clip_fraction", "approx_kl", "ratio", "correction_weight", "correction_truncated", "unsupervised_loss",
)  # fmt: skip


class DeepSpeedPPOTrainer:
    """`generate_experience`, then `train_rlhf`.

    Args:
        engine: the four models.
        rollouts, ppo: settings of both halves.
        seed: of sampling.
        judge: scores that are watched and never trained on.

    Attributes:
        samples: prompt, response and scores of the newest rollout of this rank, for people to read.
        seconds: {"rollout", "scoring", "update"} since `take_seconds` was last called.
        note: is told of what an update computes, by name; see rlhf.dump.
        gap: with --old_logprobs rollout, what gap_metrics say of the first minibatch after the newest experience.
    """

    def __init__(self, engine: DeepSpeedRLHFEngine, *, rollouts: RolloutArguments, ppo: PPOArguments, seed: int,
                 judge: Judge | None = None):  # fmt: skip
        self.engine, self.rollouts, self.ppo, self.seed, self.judge = engine, rollouts, ppo, seed, judge
        self.tokenizer = engine.tokenizer
        self.stop_ids = stop_token_ids(self.tokenizer, engine.actor.engine.module.model.generation_config.eos_token_id)
        self.reward_model = RewardModel(
            engine.reward, tokenizer=engine.reward_tokenizer, actor_tokenizer=self.tokenizer
        )
        self.samples: list[dict[str, Any]] = []
        self.gap: dict[str, float] = {}
        self.note: Callable[[str, Tensor], None] | None = None
        self.seconds = {"rollout": 0.0, "scoring": 0.0, "update": 0.0}

    @torch.no_grad()
    def generate_experience(
        self, prompts: Prompts, *, iteration: int = 0, sample_ids: Sequence[int] | None = None
    ) -> Experience:
        """Roll out, score, shape rewards, estimate advantages. Every rank calls it with its own prompts.

        Args:
            iteration, sample_ids: name the random numbers of each response; an id is unique over the iteration's
                rollout, all ranks and batches together. Default: the rows' own numbers (a prompt that occurs twice
                then gets the same response twice).
        """
        ppo, self.gap = self.ppo, {}
        names = prompts["row_index"] if sample_ids is None else sample_ids
        rollout = self.timed("rollout", lambda: self.roll_out(prompts, iteration=iteration, sample_ids=names))
        scored = self.timed("scoring", lambda: self.score(rollout, prompts))
        old_logprobs, entropy, ref_logprobs, values, scores = scored
        mask = rollout.response_mask
        kl = kl_estimate(old_logprobs, ref_logprobs, ppo.kl_estimator, response_mask=mask)
        # The penalty comes after clipping, or a score beyond the clip would swallow it.
        clipped = scores.clamp(-ppo.reward_clip, ppo.reward_clip) if ppo.reward_clip else scores
        shaped = clipped - ppo.missing_eos_penalty * (~rollout.ended)
        rewards = token_rewards(shaped, kl, mask, kl_coef=ppo.kl_coef)
        advantages, returns = gae(rewards, values, mask, gamma=ppo.gamma, gae_lambda=ppo.gae_lambda)
        return Experience(
            sequences=rollout.sequences,
            attention_mask=rollout.attention_mask,
            response_mask=mask,
            rollout_logprobs=rollout.logprobs,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            entropy=entropy,
            values=values,
            scores=scores,
            ended=rollout.ended,
            kl=kl,
            rewards=rewards,
            advantages=advantages,
            returns=returns,
        )

    def train_rlhf(
        self, minibatch: Experience, unsupervised: list[dict[str, Tensor]] | None = None
    ) -> dict[str, float]:
        """One optimizer step of the actor and one of the critic.

        Args:
            minibatch: this rank's rows of the step; cut into micro-batches here.
            unsupervised: micro-batches of collate_sft for the pretraining loss, as many on every rank.

        Returns: metrics of the whole step, the same on all ranks. With --old_logprobs rollout the gap between decoder
            and actor too: of the first step after an experience, in which the weights are still those that sampled,
            and as it was there in the metrics of later steps.
        """
        return self.timed("update", lambda: self._train_rlhf(minibatch, unsupervised or []))

    def _train_rlhf(self, minibatch: Experience, unsupervised: list[dict[str, Tensor]]) -> dict[str, float]:
        size = self.ppo.per_device_training_batch_size
        parts = [minibatch.rows(range(start, start + size)) for start in range(0, len(minibatch), size)]
        tokens = float(sum_over_ranks(minibatch.response_mask.sum()))
        texts = minibatch.response_mask.new_zeros((), dtype=torch.long)  # on the device: NCCL sums nothing else
        texts = float(sum_over_ranks(sum((batch["loss_mask"].sum() for batch in unsupervised), texts)))
        gaps = [] if self.ppo.old_logprobs == "rollout" and not self.gap else None
        actor = optimizer_step(
            self.engine.actor.engine,
            [partial(self.actor_loss, part, tokens, gaps) for part in parts]
            + [partial(self.unsupervised_loss, batch, texts) for batch in unsupervised],
        )
        self.gap = gap_metrics(gaps) if gaps else self.gap
        critic = optimizer_step(self.engine.critic, [partial(self.critic_loss, part, tokens) for part in parts])
        self.engine.update_ema(self.engine.models.ema_decay)
        variance = explained_variance({name: torch.tensor(value) for name, value in critic.items()})
        return {
            "policy_loss": actor["policy_loss"],
            "value_loss": critic["loss"],
            "explained_variance": float(variance),
            "value": critic["value_mean"],
            "actor_grad_norm": actor["grad_norm"],
            "critic_grad_norm": critic["grad_norm"],
            "actor_learning_rate": actor["learning_rate"],
            **{name: actor[name] for name in ACTOR_METRICS if name in actor},
            "skipped_updates": max(part.get("skipped_updates", 0.0) for part in (actor, critic)),
            **self.gap,
        }

    def actor_loss(self, part: Experience, tokens: float, gaps: list[Metrics] | None = None) -> tuple[Tensor, Metrics]:
        """Policy loss of a micro-batch, and its metrics; a list of gaps gets the one between decoder and actor."""
        ppo, mask = self.ppo, part.response_mask
        logprobs = self.engine.actor.engine(
            part.sequences, part.attention_mask, part.loss_mask, self.rollouts.temperature
        )  # [B, P+T]
        logprobs = _response(logprobs, mask)
        self._note("logprobs", logprobs)
        if gaps is not None:
            gaps.append(rollout_gap(logprobs, part.rollout_logprobs, mask))
        weights, correction = None, {}
        if ppo.rollout_correction == "tis" and ppo.old_logprobs == "recompute":
            weights, correction = truncated_weights(
                part.old_logprobs, part.rollout_logprobs, mask, cap=ppo.rollout_correction_cap, normalizer=tokens
            )
        loss, metrics = policy_loss(
            logprobs, part.old_logprobs, part.advantages, mask, clip_range=ppo.clip_range, weights=weights,
            normalizer=tokens,
        )  # fmt: skip
        self._note("policy_loss", loss)
        return loss, metrics | correction | {"policy_loss": loss}

    def critic_loss(self, part: Experience, tokens: float) -> tuple[Tensor, Metrics]:
        values = _states(self.engine.critic(part.sequences, part.attention_mask), part.response_mask)
        loss, metrics = value_loss(
            values, part.values, part.returns, part.response_mask,
            value_clip_range=self.ppo.value_clip_range, normalizer=tokens,
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

    def roll_out(self, prompts: Prompts, *, iteration: int, sample_ids: Sequence[int]) -> Rollout:
        """Sample one response to each prompt, as its sample id and nothing about ranks or order decides."""
        actor, rollouts = self.engine.actor, self.rollouts
        with actor.generation():
            return actor.generate(
                prompts["prompts"],
                max_new_tokens=rollouts.max_answer_seq_len,
                eos_token_ids=self.stop_ids,
                pad_token_id=self.tokenizer.pad_token_id,
                sampling=SamplingParams(rollouts.temperature, rollouts.top_k, rollouts.top_p),
                seed=self.seed,
                iteration=iteration,
                sample_ids=torch.tensor(sample_ids),
            )

    def score(self, rollout: Rollout, prompts: Prompts) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """old_logprobs, entropy, ref_logprobs, values [B, T] and scores [B] of a rollout; dropout is off."""
        engine, mask = self.engine, rollout.response_mask
        engine.critic.eval()
        ids, attended = rollout.sequences, rollout.attention_mask
        loss_mask = torch.nn.functional.pad(mask, (rollout.prompt_length, 0))
        old_logprobs, entropy = self.old_logprobs(rollout, loss_mask)
        ref_logprobs = engine.ref(ids, attended, loss_mask, self.rollouts.temperature)
        values = _states(engine.critic(ids, attended), mask)
        scores = self.reward_model.score(rollout, prompts["messages"])
        scores = scores * torch.nan if failpoint.reached("scores") else scores
        self.samples = self._samples(rollout, prompts, scores)
        return old_logprobs, entropy, _response(ref_logprobs, mask), values, scores

    def old_logprobs(self, rollout: Rollout, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T] what the ratio starts from, and entropies: of a forward pass without dropout, or of the decoder.

        Args:
            loss_mask: [B, P+T] bool, True on response tokens.
        """
        if self.ppo.old_logprobs == "rollout":
            return rollout.logprobs, -rollout.logprobs  # −log q of what q draws is its entropy, on average
        actor = self.engine.actor.engine
        actor.eval()
        logprobs, entropy = actor(
            rollout.sequences, rollout.attention_mask, loss_mask, self.rollouts.temperature, True
        )  # [B, P+T]
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

    def _samples(self, rollout: Rollout, prompts: Prompts, scores: Tensor) -> list[dict[str, Any]]:
        texts = decode_responses(self.tokenizer, rollout.responses())
        questions = [prompt_text(chat) for chat in prompts["messages"]]
        opinions = [None] * len(texts)
        if self.judge:
            patience = Patience(seconds=self.rollouts.judge_timeout, retries=self.rollouts.judge_retries)
            opinions = patience.opinions(self.judge, prompts["messages"], texts, prompts["rows"])
        rows = zip(
            questions, texts, scores.tolist(), opinions, rollout.ended.tolist(), prompts["row_index"], strict=True
        )
        names = ("prompt", "response", "score", "judge", "ended", "row_index")
        return [dict(zip(names, row, strict=True)) for row in rows]


def _response(per_token: Tensor, response_mask: Tensor) -> Tensor:
    """[B, P+T] → [B, T]: what is said of the response tokens."""
    return per_token[:, -response_mask.shape[1] :]


def _states(per_token: Tensor, response_mask: Tensor) -> Tensor:
    """[B, P+T] → [B, T]: what is said before each response token; its state ends at column P + t − 1."""
    return per_token[:, -response_mask.shape[1] - 1 : -1]
