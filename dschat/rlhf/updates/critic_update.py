"""One optimizer step of the critic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dschat.arguments import PPOArguments
from dschat.distributed.engines import Metrics, optimizer_step
from dschat.losses.value import explained_variance, value_loss
from dschat.rlhf.experience import Experience
from dschat.rlhf.rlhf_engine import DeepSpeedRLHFEngine
from dschat.rlhf.rollouts.model_outputs import state_columns
from dschat.rlhf.updates.optimizer_steps import Record, StepCounts, discard, step_metrics


class CriticUpdate:
    """Computes the value loss and takes the critic's optimizer steps."""

    def __init__(self, engine: DeepSpeedRLHFEngine, *, ppo: PPOArguments) -> None:
        self.engine, self.ppo = engine, ppo

    def step(
        self, parts: Sequence[Experience], counts: StepCounts, *, record: Record = discard
    ) -> dict[str, float]:
        """Update the critic; returns the metrics of the step. A collective.

        Args: as in DeepSpeedPPOTrainer.train_rlhf; parts are the micro-batches of the minibatch.
        """
        step = optimizer_step(self.engine.critic, [partial(self.loss, part, counts, record=record) for part in parts])
        variance = explained_variance({name: torch.tensor(value) for name, value in step.items()})
        return step_metrics(step, "critic") | {
            "value_loss": step["loss"], "explained_variance": float(variance),
        }  # fmt: skip

    def loss(self, part: Experience, counts: StepCounts, *, record: Record = discard) -> tuple[Tensor, Metrics]:
        """Value loss of a micro-batch and its metrics."""
        values = state_columns(self.engine.critic(part.sequences, part.attention_mask), part.response_mask)
        loss, metrics = value_loss(
            values, part.values, part.returns, part.trained_mask,
            value_clip_range=self.ppo.value_clip_range, normalizer=counts.tokens,
        )  # fmt: skip
        record("values", values)
        record("value_loss", loss)
        return loss, metrics
