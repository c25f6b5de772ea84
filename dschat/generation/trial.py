"""What decoders try a model with before they trust it."""

from __future__ import annotations

import inspect

from torch import Tensor
from transformers import PreTrainedModel

TRIAL_TOKENS = 12  # of each of the two rows that a model is tried on


def takes(model: PreTrainedModel, name: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return name in inspect.signature(model.forward).parameters


def distance(found: Tensor, expected: Tensor) -> float:
    """How far logits [R, V] are off, as a share of their spread over the vocabulary."""
    expected = expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return float((found.float() - expected).norm() / spread)
