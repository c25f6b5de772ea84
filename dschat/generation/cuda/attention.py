"""Triton kernels for decoding attention of one new token per row over the KV pool.

The pool of a layer holds the tokens of all rows; a row uses two spans of it, its prompt's (which other rows may share)
and its response's. Importing this module needs triton: check triton_kernels.available() first.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference" (the split over the context, and its combination);
Dao 2023, algorithm 1 (arXiv:2307.08691), for the running maximum and sum of a split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dschat.generation.cuda.kv_writes import require_contiguous_vectors
from dschat.generation.kv_pool.attention import Contexts, Scoring

# Elements per block of keys, by element size. In half precision, two blocks in flight of keys and values use 64 KiB of
# shared memory, which every GPU since Ampere has (an H100 has three times as much). Float32 uses no tensor cores; its
# products stay in registers, which larger blocks would spill.
TILE_ELEMENTS = {2: 8192, 4: 2048}
# Programs per streaming multiprocessor: several, so that processors stay busy while the first programs finish.
PROGRAMS_PER_PROCESSOR = 4
# A split writes and reads a partial result (one float32 value vector), so it must cover enough tokens to be worth it.
MIN_SPLIT_TOKENS = 128
MAX_SPLITS = 64
UNLIMITED = 2**31 - 1
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def decode_attention(
    query: Tensor, contexts: Contexts, scoring: Scoring, *, splits: int | None = None, out: Tensor | None = None
) -> Tensor:
    """Attend from one token of each row to that row's context; H = KVH·G query heads, G per KV head.

    The context of row r is its prompt span, then its response span, which ends with the query token itself; only the
    window masks tokens. Accumulates in float32. The host reads no device data, so the call can be captured in a CUDA
    graph. A row's result depends on `splits` (by rounding) but not on other rows.

    Args:
        query: [R, H, D] float16, bfloat16 or float32.
        contexts: keys [N, KVH, D] and values [N, KVH, Dv] in one dtype. The last dimension of these and of query is
            contiguous; the others have any stride. Either length of a span may be 0; a row with neither gets zeros.
            `longest` is used only to choose the number of splits.
        splits: number of parts of each row's context processed in parallel; None: choose_splits().
        out: [R, H, Dv] to write into, last dimension contiguous; None: a new tensor in the query's dtype.

    Returns:
        [R, H, Dv]; `out` if given.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit, or a window or number of splits below 1.
    """
    keys, values, spans = contexts.keys, contexts.values, contexts.spans
    (rows, heads, width), (kv_heads, value_width) = query.shape, values.shape[1:]
    if out is None:
        out = query.new_empty(rows, heads, value_width)
    _check(query, contexts, out, scoring.window, splits)
    window = scoring.window or UNLIMITED
    if splits is None:
        attended = min(contexts.longest, window)
        splits = choose_splits(rows, kv_heads, longest=attended, processors=_processors(query.device))
    tiles = Tiles.of(heads // kv_heads, width, value_width, keys.element_size())
    common = {
        "SPLITS": splits, "TOKEN_TILE": tiles.tokens, "VALUE_WIDTH": value_width, "VALUE_TILE": tiles.value_width,
    }  # fmt: skip
    partial = statistics = out  # unused if there is nothing to combine
    if splits > 1:
        partial = query.new_empty(rows, heads, splits, value_width, dtype=torch.float32)
        statistics = query.new_empty(rows, heads, splits, 2, dtype=torch.float32)  # maximum and sum
    # Rows are the first grid dimension, so samples of one prompt run concurrently and share its keys in the L2 cache.
    _attend[(rows, kv_heads * triton.cdiv(heads // kv_heads, tiles.heads), splits)](
        query, keys, values, spans, out, partial, statistics,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        spans.stride(0), out.stride(0), out.stride(1),
        float(scoring.scale), window, SOFTCAP=float(scoring.softcap or 0), GROUP=heads // kv_heads, WIDTH=width,
        KEY_TILE=tiles.width, HEAD_TILE=tiles.heads, **common, num_warps=4, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        _combine[(rows, heads)](
            partial, statistics, spans, out, spans.stride(0), out.stride(0), out.stride(1), window,
            SPLIT_TILE=triton.next_power_of_2(splits), **common, num_warps=4,
        )  # fmt: skip
    return out


@dataclass(frozen=True)
class Tiles:
    """Sizes of the blocks that a program works on: tensor cores multiply tiles of at least 16, in powers of two.

    Attributes:
        width, value_width: of a head's keys and values, padded up.
        heads: query heads of one group; tokens: of the context.
        stages: blocks of tokens in flight.
    """

    width: int
    value_width: int
    heads: int
    tokens: int
    stages: int

    @classmethod
    def of(cls, group: int, width: int, value_width: int, element_size: int) -> Tiles:
        """The tiles for `group` query heads per key-value head, and keys and values of these widths and bytes."""
        key_tile, value_tile = (max(16, triton.next_power_of_2(w)) for w in (width, value_width))
        widest = max(key_tile, value_tile)
        return cls(
            width=key_tile,
            value_width=value_tile,
            heads=32 if group > 16 and widest <= 128 and element_size == 2 else 16,
            tokens=min(128, max(16, TILE_ELEMENTS[element_size] // widest)),
            stages=3 if widest <= 256 else 2,
        )


def choose_splits(rows: int, kv_heads: int, *, longest: int, processors: int) -> int:
    """Number of splits per context, chosen so that rows · kv_heads · splits programs fill the device.

    longest: maximum number of attended tokens; processors: number of streaming multiprocessors.
    """
    splits_to_fill = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, max(1, rows * kv_heads))
    # A power of two, because each value compiles a separate kernel.
    return min(triton.next_power_of_2(min(splits_to_fill, triton.cdiv(longest, MIN_SPLIT_TOKENS))), MAX_SPLITS)


def _check(query: Tensor, contexts: Contexts, out: Tensor, window: int | None, splits: int | None) -> None:
    """Validate the arguments of decode_attention; raises one ValueError listing all problems."""
    problems = []
    keys, values, spans = contexts.keys, contexts.values, contexts.spans
    (rows, heads, width), (tokens, kv_heads, _) = query.shape, keys.shape
    if keys.shape[2] != width or heads % kv_heads or values.shape[:2] != (tokens, kv_heads):
        problems.append(
            f"query {tuple(query.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit: they "
            "must be [R, KVH·G, D], [N, KVH, D] and [N, KVH, Dv]"
        )
    if spans.shape != (rows, 4) or spans.stride(1) != 1:
        problems.append(f"spans has shape {tuple(spans.shape)}, but every row has 4 numbers: ({rows}, 4), contiguous")
    if out.shape != (rows, heads, values.shape[2]):
        problems.append(f"out has shape {tuple(out.shape)}, but the result has {(rows, heads, values.shape[2])}")
    if keys.dtype != values.dtype or keys.element_size() not in TILE_ELEMENTS:
        problems.append(f"keys are {keys.dtype}, values {values.dtype}, but both must be float32 or one half type")
    if window is not None and window < 1:
        problems.append(f"window is {window}, but it counts the query's own token: use ≥ 1, or None for all")
    if splits is not None and splits < 1:
        problems.append(f"splits is {splits}, but it must be ≥ 1, or None to choose")
    if problems:
        raise ValueError("; ".join(problems) + ".")
    require_contiguous_vectors(query=query, keys=keys, values=values, out=out)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _attended_range(spans, span_stride, row, window, SPLITS: tl.constexpr, TOKEN_TILE: tl.constexpr):
    """The attended range [first, context) of a row's context, and the number of tokens per split."""
    prompt_length = tl.load(spans + row * span_stride + 1).to(tl.int32)
    context = prompt_length + tl.load(spans + row * span_stride + 3).to(tl.int32)
    first = tl.maximum(context - window, 0)
    # Rounded up to whole blocks: the first splits cover more, and trailing splits may be empty.
    part = tl.cdiv(tl.cdiv(context - first, SPLITS), TOKEN_TILE) * TOKEN_TILE
    return first, context, part, prompt_length


@triton.jit
def _dot(a, b, total):
    if INTERPRETED:  # the interpreter would multiply the bit patterns of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _attend(
    query, keys, values, spans, out, partial, statistics,
    query_row_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    span_stride, out_row_stride, out_head_stride,
    scale, window,
    SOFTCAP: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, KEY_TILE: tl.constexpr, HEAD_TILE: tl.constexpr,
    SPLITS: tl.constexpr, TOKEN_TILE: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_TILE: tl.constexpr,
):  # fmt: skip
    """One split of one row, for up to HEAD_TILE query heads of one key head; SPLITS = 1 writes the result itself."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    TILES: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    kv_head = (tl.program_id(1) // TILES).to(tl.int64)
    first, context, part, prompt_length = _attended_range(spans, span_stride, row, window, SPLITS, TOKEN_TILE)
    begin = first + split * part
    end = tl.minimum(begin + part, context)
    if (SPLITS > 1) & (begin >= end):
        return

    in_group = tl.program_id(1) % TILES * HEAD_TILE + tl.arange(0, HEAD_TILE)  # [G]
    heads, valid_head = kv_head * GROUP + in_group, in_group < GROUP
    d, dv = tl.arange(0, KEY_TILE), tl.arange(0, VALUE_TILE)
    offset = row * query_row_stride + heads[:, None] * query_head_stride + d[None, :]
    q = tl.load(query + offset, mask=valid_head[:, None] & (d[None, :] < WIDTH), other=0.0).to(keys.dtype.element_ty)

    # Position p of the context is token start + p of the pool, with one start for the prompt and one for the response.
    prompt_start = tl.load(spans + row * span_stride)
    response_start = tl.load(spans + row * span_stride + 2) - prompt_length
    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    top = tl.full([HEAD_TILE], float("-inf"), tl.float32)
    total = tl.zeros([HEAD_TILE], tl.float32)
    weighted = tl.zeros([HEAD_TILE, VALUE_TILE], tl.float32)
    for start in range(begin, end, TOKEN_TILE):
        position = start + tl.arange(0, TOKEN_TILE)
        valid = position < end
        token = tl.where(position < prompt_length, prompt_start, response_start) + position  # [T] int64
        key_offset = token[None, :] * key_stride + d[:, None]
        k = tl.load(keys + key_offset, mask=valid[None, :] & (d[:, None] < WIDTH), other=0.0)  # [D, T]
        logits = _dot(q, k, tl.zeros([HEAD_TILE, TOKEN_TILE], tl.float32)) * scale  # [G, T]
        if SOFTCAP > 0:
            # tanh(x) = 1 − 2 / (e²ˣ + 1), which saturates where the exponential overflows.
            logits = SOFTCAP * (1.0 - 2.0 / (tl.exp(logits * (2.0 / SOFTCAP)) + 1.0))
        logits = tl.where(valid[None, :], logits * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        correction = tl.exp2(top - new_top)
        weights = tl.exp2(logits - new_top[:, None])
        value_offset = token[:, None] * value_stride + dv[None, :]
        v = tl.load(values + value_offset, mask=valid[:, None] & (dv[None, :] < VALUE_WIDTH), other=0.0)  # [T, Dv]
        total = total * correction + tl.sum(weights, axis=1)
        weighted = _dot(weights.to(v.dtype), v, weighted * correction[:, None])
        top = new_top

    valid_value = valid_head[:, None] & (dv[None, :] < VALUE_WIDTH)
    if SPLITS == 1:
        result = weighted / (total + (total == 0.0))[:, None]  # a row without tokens gets zeros
        offset = row * out_row_stride + heads[:, None] * out_head_stride + dv[None, :]
        tl.store(out + offset, result.to(out.dtype.element_ty), mask=valid_value)
    else:
        offset = (row * (tl.num_programs(1) // TILES * GROUP) + heads) * SPLITS + split  # [G]
        tl.store(partial + offset[:, None] * VALUE_WIDTH + dv[None, :], weighted, mask=valid_value)
        tl.store(statistics + offset * 2, top, mask=valid_head)
        tl.store(statistics + offset * 2 + 1, total, mask=valid_head)


@triton.jit
def _combine(
    partial, statistics, spans, out, span_stride, out_row_stride, out_head_stride, window,
    SPLITS: tl.constexpr, TOKEN_TILE: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_TILE: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
):  # fmt: skip
    """Rescale the splits of one row and head to their common maximum and add them."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, context, part, _ = _attended_range(spans, span_stride, row, window, SPLITS, TOKEN_TILE)
    split, dv = tl.arange(0, SPLIT_TILE), tl.arange(0, VALUE_TILE)
    # Splits beyond the context wrote nothing: their entries are uninitialised.
    valid = split * part < context - first
    offset = (row * tl.num_programs(1) + head) * SPLITS + split  # [S]
    top = tl.load(statistics + offset * 2, mask=valid, other=float("-inf"))
    total = tl.load(statistics + offset * 2 + 1, mask=valid, other=0.0)
    offset = offset[:, None] * VALUE_WIDTH + dv[None, :]
    weighted = tl.load(partial + offset, mask=valid[:, None] & (dv[None, :] < VALUE_WIDTH), other=0.0)  # [S, Dv]
    factor = tl.where(valid, tl.exp2(top - tl.max(top, axis=0)), 0.0)
    total = tl.sum(total * factor, axis=0)
    result = tl.sum(weighted * factor[:, None], axis=0) / (total + (total == 0.0))
    offset = row * out_row_stride + head * out_head_stride + dv
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=dv < VALUE_WIDTH)
