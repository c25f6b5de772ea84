"""One optimizer step of the critic."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dschat.arguments import PPOArguments
from dschat.distributed.engines import Metrics, optimizer_step
from dschat.losses.value import explained_variance, value_loss
from dschat.rlhf.experience import Experience, estimate_advantages
from dschat.rlhf.rlhf_engine import DeepSpeedRLHFEngine
from dschat.rlhf.rollouts.model_outputs import state_columns
from dschat.rlhf.updates.optimizer_steps import (
    Record,
    RecordPart,
    StepCounts,
    discard,
    micro_batches_of,
    step_metrics,
)
from dschat.tensors import whiten


class CriticUpdate:
    """Computes the value loss and takes the critic's optimizer steps."""

    def __init__(self, engine: DeepSpeedRLHFEngine, *, ppo: PPOArguments) -> None:
        self.engine, self.ppo = engine, ppo

    def step(self, minibatch: Experience, counts: StepCounts, *, record: Record = discard) -> dict[str, float]:
        """Update the critic; returns the metrics of the step. A collective.

        A minibatch without values is the whole rollout: its values are those of this forward pass, and it gets the
        advantages estimated from them.

        Args: as in DeepSpeedPPOTrainer.train_rlhf.
        """
        parts = micro_batches_of(minibatch, self.engine.limit_of(self.engine.critic))
        loss = partial(self.loss, counts=counts)
        step = optimizer_step(
            self.engine.critic, [partial(loss, part, record=partial(record, rows)) for rows, part in parts]
        )
        if minibatch.values is None:
            minibatch.advantages = torch.zeros_like(minibatch.rewards)
            for rows, part in parts:
                minibatch.advantages[rows, : part.rewards.shape[1]] = part.advantages[: len(rows)]
            if self.ppo.whiten_advantages:
                minibatch.advantages = whiten(minibatch.advantages, minibatch.trained_mask)
        variance = explained_variance({name: torch.tensor(value) for name, value in step.items()})
        return step_metrics(step, "critic") | {
            "value_loss": step["loss"], "explained_variance": float(variance),
        }  # fmt: skip

    def loss(
        self, micro_batch: Experience, counts: StepCounts, *, record: RecordPart = discard
    ) -> tuple[Tensor, Metrics]:
        """Value loss of a micro-batch and its metrics; estimates its advantages if it has no values."""
        values = self.engine.critic(
            micro_batch.sequences, micro_batch.attention_mask, prompt_lengths=micro_batch.prompt_lengths
        )  # [B, P+T]
        values = state_columns(values, micro_batch.response_mask)  # [B, T]
        if micro_batch.values is None:
            micro_batch.values = values.detach()
            micro_batch.advantages, micro_batch.returns = estimate_advantages(micro_batch, ppo=self.ppo)
        loss, metrics = value_loss(
            values, micro_batch.values, micro_batch.returns, micro_batch.trained_mask,
            value_clip_range=self.ppo.value_clip_range, normalizer=counts.tokens,
        )  # fmt: skip
        record("values", values)
        record("value_loss", loss)
        return loss, metrics
