"""Common parts of the optimizer steps of policy and critic: token counts, metric names, recording of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.distributed.collectives import sum_over_ranks
from dschat.rlhf.experience import Experience

Record = Callable[[str, Tensor], None]  # receives the tensors that the losses compute, by name
ENGINE_METRICS = ("loss", "grad_norm", "learning_rate", "skipped_updates")  # added by optimizer_step


def discard(name: str, tensor: Tensor) -> None:
    """A Record callback that ignores its tensors."""


@dataclass(frozen=True)
class StepCounts:
    """Trained tokens of an optimizer step, and responses with any, over all ranks and micro-batches."""

    tokens: float
    responses: float

    @classmethod
    def of(cls, minibatch: Experience) -> StepCounts:
        """Count the step's rows of all ranks; a collective."""
        mask = minibatch.trained_mask
        tokens, responses = sum_over_ranks(torch.stack([mask.sum(), mask.any(-1).sum()])).tolist()
        return cls(float(tokens), float(responses))


def step_metrics(step: Mapping[str, float], model: str) -> dict[str, float]:
    """Metrics of optimizer_step for one model: those of its loss, and MODEL_grad_norm, _learning_rate, _skipped."""
    return {
        **{name: value for name, value in step.items() if name not in ENGINE_METRICS},
        f"{model}_grad_norm": step["grad_norm"],
        f"{model}_learning_rate": step["learning_rate"],
        f"{model}_skipped": step.get("skipped_updates", 0.0),
    }
