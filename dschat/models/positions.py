"""How long a sequence a model can read, so that no token of it depends on other sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig


def position_limit(config: PreTrainedConfig) -> tuple[int | None, str]:
    """The most positions of a sequence, None where nothing bounds them, and what they are, for a message.

    A model with a vision part has them in the config of its text part. With longrope the limit is where the
    frequencies change: a model does that for all rows of a batch as soon as one row is longer.
    """
    text = config.get_text_config()
    # Not vars(): GPT-2's config knows the name as an alias. XLNet's has -1: no limit.
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
    limit = next((int(value) for value in limits if value is not None and value > 0), None)
    changes = [
        rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        for rope in _rope_parameters(text)
        if rope.get("rope_type", rope.get("type")) == "longrope"
    ]
    first = min((int(value) for value in changes if value), default=None)
    if first is not None and (limit is None or first < limit):
        return first, "positions until longrope changes its frequencies for all rows of a batch"
    return limit, "positions"


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """The parameters of each kind of layer, or of all."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None)
        if isinstance(rope, dict):
            yield from (part for part in (rope, *rope.values()) if isinstance(part, dict))
