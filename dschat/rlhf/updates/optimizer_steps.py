"""Common parts of the optimizer steps of policy and critic: token counts, metric names, recording of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.data.micro_batches import MicroBatchLimit, StepRows
from dschat.distributed.collectives import max_over_ranks, sum_over_ranks
from dschat.rlhf.experience import Experience

# Receives the tensors that the losses compute: rows of the minibatch, name, tensor of these rows (or a scalar).
Record = Callable[[Sequence[int], str, Tensor], None]
RecordPart = Callable[[str, Tensor], None]  # the same for one micro-batch
ENGINE_METRICS = ("loss", "grad_norm", "learning_rate", "skipped_updates")  # added by optimizer_step


def discard(*_: object) -> None:
    """A Record or RecordPart callback that ignores its tensors."""


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


def micro_batches_of(minibatch: Experience, limit: MicroBatchLimit) -> list[tuple[list[int], Experience]]:
    """The trained rows of a minibatch in micro-batches, equally many on all ranks. A collective.

    Returns: pairs of row indices and these rows; on a rank that has fewer micro-batches than another, the last ones
        have no indices and one row without tokens to train on.
    """
    trained, part = trained_rows(minibatch)
    rows = sequences_of(part, limit)
    budget = limit.budget(max(rows.lengths))
    own = torch.tensor(limit.fewest(rows, budget=budget), device=part.sequences.device)
    pieces = limit.split(rows, budget=budget, count=int(max_over_ranks(own)))
    return [
        ([trained[i] for i in piece] if trained else [], part.rows(piece) if piece else part.without_tokens())
        for piece in pieces
    ]


def trained_rows(minibatch: Experience) -> tuple[list[int], Experience]:
    """The rows with tokens to train on, and their indices; without any, a placeholder."""
    trained = minibatch.trained_mask.any(dim=1).nonzero().squeeze(1).tolist()
    return trained, minibatch.rows(trained) if trained else minibatch.without_tokens()


def sequences_of(rows: Experience, limit: MicroBatchLimit) -> StepRows:
    return limit.step_rows(rows.sequences, rows.attention_mask, rows.prompt_lengths)


def step_metrics(step: Mapping[str, float], model: str) -> dict[str, float]:
    """Metrics of optimizer_step for one model: those of its loss, and MODEL_grad_norm, _learning_rate, _skipped."""
    return {
        **{name: value for name, value in step.items() if name not in ENGINE_METRICS},
        f"{model}_grad_norm": step["grad_norm"],
        f"{model}_learning_rate": step["learning_rate"],
        f"{model}_skipped": step.get("skipped_updates", 0.0),
    }
