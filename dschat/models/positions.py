"""Maximum sequence length of a model, including limits beyond which rows of a batch affect each other (longrope)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig


def position_limit(config: PreTrainedConfig) -> tuple[int | None, str]:
    """The maximum number of positions, None if unlimited, and what they are, for an error message.

    Multimodal models have the limit in their text config. With longrope it is the length at which the frequencies
    change: the model switches them for all rows of a batch as soon as one row is longer.
    """
    text = config.get_text_config()
    # Not vars(): GPT-2's config has the name as an alias. XLNet's value is -1: no limit.
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
    """RoPE parameter dicts, per layer type or for all layers."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None)
        if isinstance(rope, dict):
            yield from (part for part in (rope, *rope.values()) if isinstance(part, dict))
