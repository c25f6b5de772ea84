"""Trial runs, with which decoders validate a model before using it: length, and how logits are compared."""

from __future__ import annotations

import inspect

from torch import Tensor
from transformers import PreTrainedModel

TRIAL_TOKENS = 12  # length of each of the two rows of a trial run


def accepts_argument(model: PreTrainedModel, name: str) -> bool:
    """Whether the model's forward accepts an argument of this name."""
    return name in inspect.signature(model.forward).parameters


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Relative error of logits [R, V]: L2 distance over the norm of the expected logits, centred over V."""
    expected = expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return float((logits.float() - expected).norm() / spread)
