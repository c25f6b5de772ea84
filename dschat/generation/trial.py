"""What decoders try a model on before they trust it: arguments it takes, and windows short enough to show."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel

TRIAL_TOKENS = 12  # of each of the two rows that a model is tried on
TRIAL_WINDOW = 5


def takes(model: PreTrainedModel, name: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return name in inspect.signature(model.forward).parameters


def distance(found: Tensor, expected: Tensor) -> float:
    """How far logits [R, V] are off, as a share of their spread over the vocabulary."""
    expected = expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return float((found.float() - expected).norm() / spread)


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[bool]:
    """Inside, sliding windows and attention chunks are shorter than a trial, so that ignoring one shows in its logits.

    A window stands in the config, which masks are made from, and often in the attention layers as well.

    Yields:
        Whether the model has any.
    """
    config = model.config.get_text_config()
    windows = {name: value for name, value in vars(config).items() if _is_window(name, value)}
    changed: list[tuple[object, str, int]] = []
    for place in (config, *model.modules()):
        for name, value in list(vars(place).items()):
            if _is_window(name, value) and value in windows.values():
                changed.append((place, name, value))
    try:
        for place, name, _ in changed:
            setattr(place, name, TRIAL_WINDOW)
        yield bool(windows)
    finally:
        for place, name, value in changed:
            setattr(place, name, value)


def _is_window(name: str, value: object) -> bool:
    named = name.endswith(("window", "window_size", "attention_chunk_size"))
    return named and isinstance(value, int) and not isinstance(value, bool) and value > 0
