"""Inverse-CDF sampling in two Triton kernels that read the logits once, and one block of them twice.

The distribution is that of sampling.sample_tokens() without top-k and top-p. Importing this module needs triton: check
triton_kernels.available() first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Vocabulary tokens per program: 32 per thread with four warps.
VOCABULARY_TILE = 4096


def sample(logits: Tensor, uniform: Tensor | None, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token per row: the first whose cumulative probability, in vocabulary order, exceeds the uniform number.

    The vocabulary is split into blocks. Their probability masses determine the block that contains the uniform number;
    the search continues inside it with the remainder. Block masses are float32 sums, cumulative sums are float64.
    The host reads no device data, so the call can be captured in a CUDA graph.

    Args:
        logits: [R, V] float, any precision, the last dimension contiguous.
        uniform: [R] float strictly between 0 and 1; None if the temperature is 0.
        temperature: ≥ 0; 0 is greedy: the most likely token, the lowest id among ties.

    Returns:
        tokens: [R] long. A token of probability 0 is never drawn.
        logprobs: [R] float32, in nats, under the tempered distribution; for greedy tokens at temperature 1. NaN
            logits give a NaN log-prob and an arbitrary token of the vocabulary.

    Raises:
        ValueError: a negative temperature, missing uniform numbers, or logits not contiguous along the vocabulary.
    """
    rows, vocabulary = logits.shape
    greedy = temperature == 0
    problems = []
    if not temperature >= 0:
        problems.append(f"temperature is {temperature}, but it must be ≥ 0 (0 decodes greedily)")
    if not greedy and (uniform is None or uniform.shape != (rows,)):
        shape = None if uniform is None else tuple(uniform.shape)
        problems.append(f"uniform is {shape}, but it needs one number per row: ({rows},)")
    if logits.stride(1) != 1:
        problems.append(f"logits have stride {logits.stride(1)} along the vocabulary, but it must be 1: .contiguous()")
    if problems:
        raise ValueError("; ".join(problems) + ".")

    blocks = triton.cdiv(vocabulary, VOCABULARY_TILE)
    tops, sums = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)  # [R, blocks] each
    tokens = torch.empty(rows, dtype=torch.long, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if greedy:
        uniform, temperature = logprobs, 1.0  # not read
    common = {"VOCABULARY": vocabulary, "TILE": VOCABULARY_TILE}
    _measure_blocks[(rows, blocks)](logits, tops, sums, logits.stride(0), float(temperature), **common, num_warps=4)
    _draw[(rows,)](
        logits, uniform, tops, sums, tokens, logprobs, logits.stride(0), uniform.stride(0), float(temperature),
        GREEDY=greedy, BLOCKS=blocks, BLOCK_TILE=triton.next_power_of_2(blocks), **common, num_warps=8,
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _tempered(logits, row_stride, row, block, temperature, VOCABULARY: tl.constexpr, TILE: tl.constexpr):
    """One block of a row's logits ÷ temperature, −inf beyond the vocabulary: [TILE] float32."""
    token = block * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * row_stride + token, mask=token < VOCABULARY, other=float("-inf"))
    # Correctly rounded, as torch does on a CPU: plain GPU division is off by up to 2 ulp.
    return tl.div_rn(x.to(tl.float32), temperature)


@triton.jit
def _weights(x, top):
    """e^(x − top), 0 at −inf even if the whole block is −inf: [TILE] float32."""
    return tl.where(x == float("-inf"), 0.0, tl.exp(x - top))


@triton.jit
def _first(condition, weights, COUNT: tl.constexpr):
    """The first index with `condition` and a positive weight; if rounding or NaN leave none, the last with a positive
    weight; else 0."""
    index = tl.arange(0, COUNT)
    last = tl.max(tl.where(weights > 0, index, 0), axis=0)
    return tl.minimum(tl.min(tl.where(condition & (weights > 0), index, COUNT), axis=0), last)


@triton.jit
def _measure_blocks(logits, tops, sums, row_stride, temperature, VOCABULARY: tl.constexpr, TILE: tl.constexpr):
    """The largest tempered logit of one block, and the sum of the weights relative to it."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    x = _tempered(logits, row_stride, row, block, temperature, VOCABULARY, TILE)
    top = tl.max(x, axis=0)
    offset = row * tl.num_programs(1) + block
    tl.store(tops + offset, top)
    tl.store(sums + offset, tl.sum(_weights(x, top), axis=0))


@triton.jit
def _draw(
    logits, uniform, tops, sums, tokens, logprobs, row_stride, uniform_stride, temperature,
    GREEDY: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_TILE: tl.constexpr, VOCABULARY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the block that contains one row's uniform number, then the token in it."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_TILE)
    block_tops = tl.load(tops + row * BLOCKS + index, mask=index < BLOCKS, other=float("-inf"))
    block_sums = tl.load(sums + row * BLOCKS + index, mask=index < BLOCKS, other=0.0)
    top = tl.max(block_tops, axis=0)
    masses = (block_sums * _weights(block_tops, top)).to(tl.float64)  # [blocks]
    total = tl.sum(masses, axis=0)
    if GREEDY:
        block = _first(block_tops == top, masses, BLOCK_TILE)
        x = _tempered(logits, row_stride, row, block, temperature, VOCABULARY, TILE)
        choice = _first(x == top, _weights(x, top), TILE)
    else:
        target = tl.load(uniform + row * uniform_stride).to(tl.float64) * total
        block = _first(tl.cumsum(masses, axis=0) > target, masses, BLOCK_TILE)
        before = tl.sum(tl.where(index < block, masses, 0.0), axis=0)
        # As a fraction of the block's mass: its float32 mass and the float64 sum of its weights round differently.
        share = (target - before) / tl.sum(tl.where(index == block, masses, 0.0), axis=0)
        x = _tempered(logits, row_stride, row, block, temperature, VOCABULARY, TILE)
        weights = _weights(x, tl.max(x, axis=0)).to(tl.float64)
        choice = _first(tl.cumsum(weights, axis=0) > share * tl.sum(weights, axis=0), weights, TILE)
    drawn = tl.sum(tl.where(tl.arange(0, TILE) == choice, x, 0.0), axis=0)
    tl.store(tokens + row, (block * TILE + choice).to(tl.int64))
    tl.store(logprobs + row, drawn - top - tl.log(total.to(tl.float32)))
