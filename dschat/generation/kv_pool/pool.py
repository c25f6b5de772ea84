"""KVPool: one token pool per layer with contiguous runs per prompt and row, as a cache of transformers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache

from dschat.generation.kv_pool.allocator import KVAllocator
from dschat.generation.kv_pool.attention import Contexts, Scoring, decode_attention

ATTENTION_NAME = "dschat_decoding"  # the name under which `attend` is registered with transformers
UNUSED_INDEX = 0  # index of the pool that belongs to no row


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's keys and values for one token."""

    heads: int
    width: int
    value_width: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.heads * (self.width + self.value_width) * self.dtype.itemsize


class KVPool(Cache):
    """transformers' Cache interface over a pool: a forward pass either prefills prompts or adds a token to each row.

    Attributes:
        size: capacity in tokens, per layer; index 0 belongs to no row.
        shapes: of each layer, set by its first forward.
        windows: the sliding window that each layer passed to its attention during decoding.
    """

    def __init__(self, size: int, *, kernels: bool = True) -> None:
        """Create a pool of `size` tokens, allocated on first use; kernels: see kv_pool.attention."""
        super().__init__(layers=[])
        self.size, self.kernels = size, kernels
        self.allocator = KVAllocator(UNUSED_INDEX + 1, size)
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._prompt_indices: Tensor | None = None
        self._token_columns: Tensor | None = None
        self._spans: Tensor | None = None
        self._longest = 0
        self._index: Tensor | None = None

    def clear(self) -> None:
        """Free all runs."""
        self.allocator = KVAllocator(UNUSED_INDEX + 1, self.size)

    def begin_prefill(self, indices: Tensor, columns: Tensor | None) -> None:
        """Set the next forward passes to prefill prompts [U, P] and store their keys and values.

        Args:
            indices: [tokens] long, pool indices of the prompt tokens.
            columns: [tokens] long, their indices in the flattened [U·P] batch; None: all, there is no padding.
        """
        self._prompt_indices, self._token_columns, self._spans, self._index = indices, columns, None, None

    def begin_step(self, spans: Tensor, *, longest: int) -> None:
        """Set the next forward passes to run the newest token of each row; arguments: see Contexts."""
        self._spans, self._longest, self._prompt_indices, self._index = spans, longest, None, None

    def begin_gathered_step(self, spans: Tensor) -> Tensor:
        """As `begin_step`, for the model's own attention, which gets each row's gathered context, left-padded.

        Returns:
            The mask [R, L] bool of the contexts; L is the longest context.
        """
        prompt_start, prompt_length, response_start, response_length = spans.T.unsqueeze(-1)  # each [R, 1]
        context = prompt_length + response_length
        columns = int(context.max())
        position = torch.arange(columns, device=spans.device) - columns + context  # [R, L], below 0 on padding
        in_response = response_start + position - prompt_length
        index = torch.where(position < prompt_length, prompt_start + position, in_response)
        is_token = position >= 0
        self.begin_step(spans, longest=columns)
        self._index = torch.where(is_token, index, UNUSED_INDEX)
        return is_token

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [R, heads, new tokens, width]. Decoding results are for `attend` only."""
        if layer_idx not in self._buffers:
            shape = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3], key_states.dtype)
            self.shapes[layer_idx] = shape
            self._buffers[layer_idx] = (
                key_states.new_zeros(self.size, shape.heads, shape.width),
                value_states.new_zeros(self.size, shape.heads, shape.value_width),
            )
        if self._index is not None:
            return self._gathered(layer_idx, key_states, value_states)
        if self._spans is not None:
            return NewTokens(self, layer_idx, key_states), value_states
        for store, states in zip(self._buffers[layer_idx], (key_states, value_states), strict=True):
            tokens = states.transpose(1, 2).flatten(0, 1)  # [U·P, heads, width]
            # By index: boolean masks would synchronise with the device, twice per layer.
            tokens = tokens if self._token_columns is None else tokens[self._token_columns]
            store.index_copy_(0, self._prompt_indices, tokens)
        return key_states, value_states

    def _gathered(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Store the newest keys and values [R, heads, 1, width]; returns all contexts', [R, heads, L, width]."""
        newest = self._spans[:, 2] + self._spans[:, 3] - 1
        for store, states in zip(self._buffers[layer], new, strict=True):
            store.index_copy_(0, newest, states[:, :, 0])
        return tuple(store[self._index].transpose(1, 2) for store in self._buffers[layer])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query [R, H, 1, D], key [R, G, 1, D], value [R, G, 1, Dv] → [R, 1, H, Dv]; packed prompts of R tokens in all
        have [1, H, R, D] and so on."""
        self.windows[layer] = scoring.window
        packed = query.shape[2] > 1
        newest = [x[0].transpose(0, 1) if packed else x[:, :, 0] for x in (query, key, value)]
        contexts = Contexts(*self._buffers[layer], self._spans, longest=self._longest)
        return decode_attention(*newest, contexts, scoring, kernels=self.kernels).unsqueeze(0 if packed else 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0 except for gathered contexts: positions are passed explicitly and masks cover the new columns only."""
        return 0 if self._index is None else self._index.shape[1] - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


@dataclass(frozen=True)
class NewTokens:
    """Passed as `key` through a model's attention to `attend`: the newest keys and a reference to the pool."""

    pool: KVPool
    layer: int
    keys: Tensor


def attend(
    module: nn.Module,
    query: Tensor,
    key: NewTokens,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Decoding attention over the pool, with the signature of transformers' AttentionInterface.

    Raises:
        NotImplementedError: the model passes an unsupported argument that changes attention.
    """
    unsupported = [name for name in ("s_aux", "position_bias", "sinks", "head_mask") if kwargs.get(name) is not None]
    if unsupported:
        raise NotImplementedError(f"attention with {', '.join(unsupported)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale=scale, window=sliding_window, softcap=softcap)
    return key.pool.attend(key.layer, query, key.keys, value, scoring), None


AttentionInterface.register(ATTENTION_NAME, attend)
