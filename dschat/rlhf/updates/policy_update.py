"""One optimizer step of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dschat.arguments import PPOArguments, RolloutArguments
from dschat.distributed.collectives import sum_over_ranks
from dschat.distributed.engines import Metrics, optimizer_step
from dschat.losses.normalizer import divisor
from dschat.losses.sft import sft_loss
from dschat.rlhf.advantages import kl_estimate
from dschat.rlhf.experience import Experience
from dschat.rlhf.rlhf_engine import DeepSpeedRLHFEngine
from dschat.rlhf.rollouts.logprob_mismatch import mismatch_metrics, rollout_logprob_mismatch
from dschat.rlhf.rollouts.model_outputs import response_columns
from dschat.rlhf.updates.actor_loss import ActorLoss
from dschat.rlhf.updates.optimizer_steps import (
    Record,
    RecordPart,
    StepCounts,
    discard,
    micro_batches_of,
    step_metrics,
)


class PolicyUpdate:
    """Computes the losses of the policy and takes its optimizer steps.

    Attributes:
        actor_loss: the configured loss of a micro-batch.
    """

    def __init__(self, engine: DeepSpeedRLHFEngine, *, rollouts: RolloutArguments, ppo: PPOArguments) -> None:
        self.engine, self.rollouts, self.ppo = engine, rollouts, ppo
        self.actor_loss = ActorLoss(ppo, max_tokens=rollouts.max_answer_seq_len)

    def step(
        self, minibatch: Experience, unsupervised: Sequence[dict[str, Tensor]], counts: StepCounts, *,
        kl_coef: float, measure_mismatch: bool = False, record: Record = discard,
    ) -> dict[str, float]:  # fmt: skip
        """Update the policy, then its moving average; returns the metrics of the step. A collective.

        Args: as in DeepSpeedPPOTrainer.train_rlhf.
        """
        zero = torch.zeros((), dtype=torch.long, device=self.engine.policy.device)  # NCCL reduces device tensors only
        text_tokens = float(sum_over_ranks(sum((batch["loss_mask"].sum() for batch in unsupervised), zero)))
        mismatches: list[Metrics] | None = [] if measure_mismatch else None
        loss = partial(self.loss, counts=counts, kl_coef=kl_coef, mismatches=mismatches)
        parts = micro_batches_of(minibatch, self.engine.limit_of(self.engine.policy))
        step = optimizer_step(
            self.engine.policy,
            [partial(loss, part, record=partial(record, rows)) for rows, part in parts]
            + [partial(self.unsupervised_loss, batch, text_tokens) for batch in unsupervised],
        )
        self.engine.update_ema(self.engine.models.ema_decay)
        return step_metrics(step, "actor") | (mismatch_metrics(mismatches) if mismatches else {})

    def loss(
        self, micro_batch: Experience, counts: StepCounts, *, kl_coef: float, mismatches: list[Metrics] | None = None,
        record: RecordPart = discard,
    ) -> tuple[Tensor, Metrics]:  # fmt: skip
        """Policy loss of a micro-batch and its metrics; appends the rollout log-prob mismatch to `mismatches`."""
        entropy, is_first = None, micro_batch.old_logprobs is None
        with_entropy = self.actor_loss.needs_entropy or is_first
        logprobs = self.engine.policy(
            micro_batch.sequences, micro_batch.attention_mask, micro_batch.loss_mask, self.rollouts.temperature,
            with_entropy,
        )  # fmt: skip
        if with_entropy:
            logprobs, entropy = logprobs
            entropy = response_columns(entropy, micro_batch.response_mask)
        logprobs = response_columns(logprobs, micro_batch.response_mask)
        if mismatches is not None:
            mismatches.append(
                rollout_logprob_mismatch(logprobs, micro_batch.rollout_logprobs, micro_batch.response_mask)
            )
        record("logprobs", logprobs)
        loss, metrics = self.actor_loss(logprobs, entropy, micro_batch, counts, kl_coef=kl_coef)
        record("policy_loss", loss)
        return loss, metrics | (self.rollout_metrics(logprobs, entropy, micro_batch, counts) if is_first else {})

    @torch.no_grad()
    def rollout_metrics(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: Experience, counts: StepCounts
    ) -> Metrics:
        """What scoring would have logged of the trained responses: entropy per token and KL per response, nats."""
        mask = micro_batch.trained_mask
        metrics = {"entropy": entropy[mask].sum() / divisor(counts.tokens)}
        if micro_batch.ref_logprobs is not None:
            kl = kl_estimate(
                logprobs, micro_batch.ref_logprobs, self.ppo.kl_estimator, response_mask=mask,
                clip=self.ppo.kl_clip or None,
            )  # fmt: skip
            metrics["kl"] = kl[mask].sum() / divisor(counts.responses)
        return metrics

    def unsupervised_loss(self, batch: dict[str, Tensor], tokens: float) -> tuple[Tensor, Metrics]:
        """PTX loss of a micro-batch of texts.

        Args:
            tokens: trained text tokens of the step, over all ranks.
        """
        logprobs = self.engine.policy(batch["input_ids"], batch["attention_mask"], batch["loss_mask"])
        loss, _ = sft_loss(logprobs, batch["loss_mask"], normalizer=tokens)
        return self.ppo.unsup_coef * loss, {"unsupervised_loss": loss}
