"""Maximum sequence length of a model, including limits beyond which rows of a batch affect each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

LONGROPE = (
    "positions until longrope changes its frequencies for all rows of a batch (to go beyond, copy long_factor to "
    "short_factor in its config.json: every row then uses the long ones)"
)
SPARSE = (
    "tokens until its sparse indexer leaves tokens out, and ties between their scores make a row depend on its padding "
    "(to go beyond, raise index_topk in its config.json: every token is then attended to)"
)


def position_limit(config: PreTrainedConfig) -> tuple[int | None, str]:
    """The maximum number of positions, None if unlimited, and what they are, for an error message.

    Multimodal models have the limit in their text config. Two kinds of models have a lower one, up to which a row does
    not depend on the others of its batch:

    - longrope: the model switches the frequencies of all rows as soon as one row is longer. Models whose short and long
      factors are equal have no such limit.
    - sparse indexers (DeepSeek-V3.2, GLM-MoE-DSA): beyond index_topk a token attends to the tokens of the highest index
      scores. Scores are sums of ReLUs, so several are often exactly 0, and padding decides which of these are chosen.
    """
    text = config.get_text_config()
    # Not vars(): GPT-2's config has the name as an alias. XLNet's value is -1: no limit.
    stored = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
    limits = [(int(value), "positions") for value in stored if value is not None and value > 0][:1]
    limits += [(length, LONGROPE) for length in _longrope_lengths(text)]
    index_topk = getattr(text, "index_topk", None)
    limits += [(int(index_topk), SPARSE)] if index_topk else []
    return min(limits, key=lambda limit: limit[0], default=(None, "positions"))


def _longrope_lengths(config: PreTrainedConfig) -> Iterator[int]:
    """The lengths beyond which longrope uses other frequencies."""
    for rope in _rope_parameters(config):
        changes = rope.get("short_factor") != rope.get("long_factor")
        if changes and rope.get("rope_type", rope.get("type")) == "longrope":
            length = rope.get("original_max_position_embeddings")
            length = length or getattr(config, "original_max_position_embeddings", None)
            if length:
                yield int(length)


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """RoPE parameter dicts, per layer type or for all layers."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None)
        if isinstance(rope, dict):
            yield from (part for part in (rope, *rope.values()) if isinstance(part, dict))
