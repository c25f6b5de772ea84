"""KV cache for hf_cache_decoder: grows in place and supports removing finished rows.

transformers' own DynamicLayer concatenates, which copies the whole cache for every token.
"""

from __future__ import annotations

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

GROWTH = 1.5


class GrowingLayer(DynamicLayer):
    """Keys and values of one full-attention layer, in buffers with spare capacity.

    `keys` and `values` are [B, heads, length, width] views of the filled part, as in DynamicLayer. The buffers grow by
    half (so a token is copied twice on average), but not beyond `limit` columns unless more tokens are appended.
    """

    _layer_type = None

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.buffers: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, stop = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if start == 0:
            # Prompts without spare capacity: reorder_cache may still repeat rows, for samples of one prompt.
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        if self.buffers is None or self.buffers[0].shape[-2] < stop:
            self._grow(stop)
        key_buffer, value_buffer = self.buffers
        key_buffer[:, :, start:stop] = key_states
        value_buffer[:, :, start:stop] = value_states
        self.keys, self.values = key_buffer[:, :, :stop], value_buffer[:, :, :stop]
        return self.keys, self.values

    def _grow(self, columns: int) -> None:
        capacity = max(columns, min(self.limit, int(columns * GROWTH) + 16))
        self.buffers = (_with_capacity(self.keys, capacity), _with_capacity(self.values, capacity))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        # The selected rows are a copy without spare capacity; the next token allocates new buffers.
        super().reorder_cache(beam_idx)
        self.buffers = None


def _with_capacity(states: Tensor, capacity: int) -> Tensor:
    """Copy [B, heads, length, width] into the front of a new [B, heads, capacity, width]."""
    buffer = states.new_empty(*states.shape[:-2], capacity, states.shape[-1])
    buffer[:, :, : states.shape[-2]] = states
    return buffer


def new_cache(config: PreTrainedConfig, *, limit: int) -> DynamicCache:
    """An empty cache for a model: full-attention layers grow in place, all others are transformers' own.

    Args:
        config: the model's config.
        limit: maximum number of columns a layer will hold.
    """
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer(limit) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
