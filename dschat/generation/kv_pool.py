"""KV pool: keys and values of all rows in flight, one token pool per layer with contiguous runs per prompt and row."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from dschat.generation.attention import decode_attention
from dschat.generation.host_tensors import to_device
from dschat.generation.rollout import left_pad
from dschat.generation.trial import TRIAL_TOKENS, distance, takes
from dschat.models.windows import short_windows
from dschat.tensors import position_ids

logger = logging.getLogger(__name__)

DECODING = "dschat_decoding"  # the name under which `attend` is registered with transformers
UNUSED_TOKEN = 0  # index of the pool that belongs to no row


class KVAllocator:
    """First-fit allocator of contiguous runs in a pool; `free` holds the free runs (start, length) in order."""

    def __init__(self, start: int, stop: int) -> None:
        self.free = [(start, stop - start)]

    def allocate(self, length: int) -> int | None:
        """Allocate a run of this length; returns its start, or None if no free run is long enough."""
        for index, (start, size) in enumerate(self.free):
            if size >= length:
                self.free[index : index + 1] = [(start + length, size - length)] if size > length else []
                return start
        return None

    def free_run(self, start: int, length: int) -> None:
        """Free a run and merge it with adjacent free runs."""
        insort(self.free, (start, length))
        index = self.free.index((start, length))
        for left in (index, index - 1):  # first the following run, then the preceding one
            if left >= 0 and left + 1 < len(self.free) and sum(self.free[left]) == self.free[left + 1][0]:
                self.free[left : left + 2] = [(self.free[left][0], self.free[left][1] + self.free[left + 1][1])]


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
        """Create a pool of `size` tokens, allocated on first use; kernels: see attention.decode_attention."""
        super().__init__(layers=[])
        self.size, self.kernels = size, kernels
        self.runs = KVAllocator(UNUSED_TOKEN + 1, size)
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._prompt_places: Tensor | None = None
        self._real: Tensor | None = None
        self._spans: Tensor | None = None
        self._longest = 0
        self._index: Tensor | None = None

    def clear(self) -> None:
        """Free all runs."""
        self.runs = KVAllocator(UNUSED_TOKEN + 1, self.size)

    def fill_in(self, places: Tensor, real: Tensor | None) -> None:
        """Set the next forward passes to prefill prompts [U, P] and store their keys and values.

        Args:
            places: [tokens] long, pool indices of the prompt tokens.
            real: [tokens] long, their indices in the flattened [U·P] batch; None: all, there is no padding.
        """
        self._prompt_places, self._real, self._spans, self._index = places, real, None, None

    def extend(self, spans: Tensor, *, longest: int) -> None:
        """Set the next forward passes to run the newest token of each row; arguments: see decode_attention."""
        self._spans, self._longest, self._prompt_places, self._index = spans, longest, None, None

    def extend_gathered(self, spans: Tensor) -> Tensor:
        """As `extend`, for the model's own attention, which gets each row's gathered context, left-padded.

        Returns:
            The mask [R, L] bool of the contexts; L is the longest context.
        """
        prompt_start, prompt_length, response_start, response_length = spans.T.unsqueeze(-1)  # each [R, 1]
        context = prompt_length + response_length
        columns = int(context.max())
        place = torch.arange(columns, device=spans.device) - columns + context  # [R, L], below 0 on padding
        index = torch.where(place < prompt_length, prompt_start + place, response_start + place - prompt_length)
        real = place >= 0
        self.extend(spans, longest=columns)
        self._index = torch.where(real, index, UNUSED_TOKEN)
        return real

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [R, heads, new tokens, width]. A decoding step's result is for `attend` only."""
        if layer_idx not in self._stored:
            shape = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3], key_states.dtype)
            self.shapes[layer_idx] = shape
            self._stored[layer_idx] = (
                key_states.new_zeros(self.size, shape.heads, shape.width),
                value_states.new_zeros(self.size, shape.heads, shape.value_width),
            )
        if self._index is not None:
            return self._gathered(layer_idx, key_states, value_states)
        if self._spans is not None:
            return NewTokens(self, layer_idx, key_states), value_states
        for store, states in zip(self._stored[layer_idx], (key_states, value_states), strict=True):
            columns = states.transpose(1, 2).flatten(0, 1)  # [U·P, heads, width]
            # By index: boolean masks would synchronise with the device, twice per layer.
            store.index_copy_(0, self._prompt_places, columns if self._real is None else columns[self._real])
        return key_states, value_states

    def _gathered(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Store the newest keys and values [R, heads, 1, width]; returns all contexts', [R, heads, L, width]."""
        newest = self._spans[:, 2] + self._spans[:, 3] - 1
        for store, states in zip(self._stored[layer], new, strict=True):
            store.index_copy_(0, newest, states[:, :, 0])
        return tuple(store[self._index].transpose(1, 2) for store in self._stored[layer])

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """query [R, H, 1, D], key [R, G, 1, D], value [R, G, 1, Dv] → [R, 1, H, Dv]; packed prompts of R tokens in all
        have [1, H, R, D] and so on."""
        self.windows[layer] = window
        keys, values = self._stored[layer]
        packed = query.shape[2] > 1
        newest = [x[0].transpose(0, 1) if packed else x[:, :, 0] for x in (query, key, value)]
        out = decode_attention(
            *newest, keys, values, self._spans,
            scale=scale, window=window, softcap=softcap, longest=self._longest, kernels=self.kernels,
        )  # fmt: skip
        return out.unsqueeze(0 if packed else 1)

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
        NotImplementedError: the model passes an argument that changes attention and is not supported.
    """
    unknown = [name for name in ("s_aux", "position_bias", "sinks", "head_mask") if kwargs.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = key.pool.attend(key.layer, query, key.keys, value, scale=scale, window=sliding_window, softcap=softcap)
    return out, None


AttentionInterface.register(DECODING, attend)


class PooledModel:
    """Runs a model's prefill and decoding forwards over a KV pool.

    Attributes:
        packs: short prompts can be prefilled packed, without padding; set by `mismatch`.
        gathers: each step gathers the rows' contexts from the pool for the model's own attention, where the pool's
            attention does not apply (ALiBi, latent or chunked attention, sliding masks); set by `mismatch`.
        capture_failure: why capturing a decoding step failed; it is not tried again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.shapes: dict[int, LayerShape] = {}
        self.packs = self.gathers = False
        self.capture_failure: str | None = None
        self._takes = {name: takes(model, name) for name in ("position_ids", "logits_to_keep", "past_key_values")}

    @property
    def captures(self) -> bool:
        """Whether steps can be captured: gathered contexts change shape at every step."""
        return not self.gathers

    def prefill(self, pool: KVPool, prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """Prefill prompts, left-padded, storing keys and values from `starts` on; returns the last logits, [U, V].

        Everything that depends on lengths is computed on the host, which avoids device synchronisation.
        """
        device = self.model.get_input_embeddings().weight.device
        ids, mask = left_pad(prompts, pad_token_id=0, device=torch.device("cpu"))  # [U, P]
        positions = position_ids(mask)
        places = (torch.tensor(starts).unsqueeze(1) + positions)[mask]  # [tokens]
        whole = bool(mask.all())
        real = None if whole else to_device(mask.flatten().nonzero().squeeze(1), device)
        pool.fill_in(to_device(places, device), real)
        attention_mask = None if whole else to_device(mask.long(), device)
        return self._forward(to_device(ids, device), attention_mask, to_device(positions, device), pool)

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, pool: KVPool | None) -> Tensor:
        """The logits [R, V] after the last column."""
        inputs = {"position_ids": positions, "logits_to_keep": 1, "past_key_values": pool}
        taken = {name: value for name, value in inputs.items() if self._takes[name]}
        if pool is not None and "past_key_values" not in taken:
            raise NotImplementedError("it keeps no keys and values")
        use_cache = pool is not None
        out = self.model(input_ids=ids, attention_mask=mask, use_cache=use_cache, return_dict=True, **taken)
        return out.logits[:, -1]

    def prefill_packed(self, pool: KVPool, prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """As `prefill`, with prompts packed into one row; each token attends like a row of a decoding step.

        Without padding this is cheaper for short prompts; for long ones blockwise attention is faster.
        """
        device = self.model.get_input_embeddings().weight.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        first = torch.tensor(starts, device=device).repeat_interleave(lengths)
        ends = lengths.cumsum(0)
        positions = torch.arange(len(ids), device=device) - (ends - lengths).repeat_interleave(lengths)
        spans = torch.stack([first, positions, first + positions, torch.ones_like(first)], dim=1)
        pool.extend(spans, longest=max(map(len, prompts)))
        with self._decoding_attention():
            return self.model(
                input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), past_key_values=pool, use_cache=True,
                logits_to_keep=ends - 1, return_dict=True,
            ).logits[0]  # fmt: skip

    @contextmanager
    def _decoding_attention(self) -> Iterator[None]:
        config = self.model.config
        usual, config._attn_implementation = config._attn_implementation, DECODING
        try:
            yield
        finally:
            config._attn_implementation = usual

    def decode(self, pool: KVPool, tokens: Tensor, spans: Tensor, *, longest: int) -> Tensor:
        """Run the newest token of each row, tokens [R]; returns the next logits, [R, V]."""
        positions = (spans[:, 1] + spans[:, 3] - 1).unsqueeze(1)
        if self.gathers:
            return self._forward(tokens.unsqueeze(1), pool.extend_gathered(spans).long(), positions, pool)
        pool.extend(spans, longest=longest)
        with self._decoding_attention():
            return self._forward(tokens.unsqueeze(1), None, positions, pool)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes per token, all layers together; set by `mismatch`."""
        return sum(shape.bytes for shape in self.shapes.values())

    @torch.inference_mode()
    def mismatch(self) -> str | None:
        """Why this model cannot run over the pool, or None; compares logits of a few tokens with the plain forward.

        Support is tested rather than listed by architecture: any difference in attention changes the logits.
        """
        problems = []
        for self.gathers in (False, True):
            with short_windows(self.model) as has_windows:
                problem = self._mismatch(has_windows)
            if problem is None:
                if self.gathers:
                    logger.info(
                        "%s: contexts are gathered out of the pool for its own attention at every step, which costs a "
                        "copy of keys and values: %s", type(self.model).__name__, problems[0],
                    )  # fmt: skip
                return None
            problems.append(problem)
        self.gathers = False
        return problems[0]

    def _mismatch(self, has_windows: bool) -> str | None:
        embeddings = self.model.get_input_embeddings()
        vocabulary, device = embeddings.num_embeddings, embeddings.weight.device
        ids = torch.arange(2 * TRIAL_TOKENS, device=device).view(2, -1) * 7919 % vocabulary
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[1, :3] = False
        positions = position_ids(mask)
        pool = KVPool(2 * TRIAL_TOKENS + 3)
        starts = torch.tensor([[1], [1 + TRIAL_TOKENS]], device=device)
        prompts = [row[real].tolist() for row, real in zip(ids[:, :-1], mask[:, :-1], strict=True)]
        try:
            expected = self._forward(ids, mask.long(), positions, None)
            self.prefill(pool, prompts, [1, 1 + TRIAL_TOKENS])
            lengths = mask[:, :-1].sum(1, keepdim=True)
            newest = torch.tensor([[2 * TRIAL_TOKENS + 1], [2 * TRIAL_TOKENS + 2]], device=device)
            spans = torch.cat([starts, lengths, newest, torch.ones_like(newest)], dim=1)
            found = self.decode(pool, ids[:, -1], spans, longest=TRIAL_TOKENS)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # anything the model's own code raises when given this cache
            if strange := self._strange_layers():
                return f"it has layers of {strange}, whose state is no keys and values"
            return f"its attention does not go through transformers' AttentionInterface as we know it ({error})"
        self.shapes = pool.shapes
        most = 1e-2 if expected.dtype == torch.float32 else 0.1
        off = distance(found, expected)
        if not off < most:
            return f"over the pool its logits are off by {off:.2g} of their spread"
        self.packs = device.type == "cpu" and not self.gathers and self._packs(ids, mask, expected, most)
        return self._window_mismatch(pool.windows, has_windows)

    def _packs(self, ids: Tensor, mask: Tensor, expected: Tensor, most: float) -> bool:
        """Whether packed prompts give the same logits, which holds if only attention mixes tokens."""
        prompts = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
        pool = KVPool(2 * TRIAL_TOKENS + 1)
        try:
            found = self.prefill_packed(pool, prompts, [1, 1 + TRIAL_TOKENS])
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return False
        return distance(found, expected) < most

    def _window_mismatch(self, windows: dict[int, int | None], has_windows: bool) -> str | None:
        """Reports layers with other state than keys and values, and windows that the trial could not test, or None."""
        if strange := self._strange_layers():
            return f"it has layers of {strange}"
        if has_windows or self.gathers:
            return None
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None) or []
        silent = [
            layer for layer, kind in enumerate(kinds) if (kind == "sliding_attention") != bool(windows.get(layer))
        ]
        return f"its layers {silent} do not tell their attention which window they have" if silent else None

    def _strange_layers(self) -> str:
        """The layer types that the pool does not support, even if a few tokens give equal logits."""
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None) or []
        served = {"full_attention", "sliding_attention"} | ({"chunked_attention"} if self.gathers else set())
        return ", ".join(sorted(set(kinds) - served))
