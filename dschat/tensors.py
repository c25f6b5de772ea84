"""Masked statistics, log-probs of labels and counter-based random numbers: pure torch, no model, no config.

Masks are bool and True means "counts". Half-precision inputs are computed in, and returned as, float32; float64
stays float64. Inputs are never modified.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dschat.softmax_head import LogitTransform, SoftmaxHead

# e²⁰ is 5e8: larger log-ratios carry no further information, and one unclamped outlier can overflow the step to inf.
LOG_RATIO_LIMIT = 20.0

# Bytes of one float32 copy of a block of logits, see linear_logprobs. A block that fits a CPU's cache is fastest; an
# accelerator needs larger ones, since a block is about 15 kernel launches.
LOGIT_BLOCK_BYTES = {"cpu": 16 << 20, "accelerator": 64 << 20}


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or as it is when it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def require_mask(mask: Tensor, **tensors: Tensor) -> None:
    """Check that mask is bool and that every named tensor has its shape.

    Raises:
        ValueError: names the tensor, both shapes (or the dtype) and the fix.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}, but masks are torch.bool (True = counts): pass mask.bool().")
    for name, x in tensors.items():
        if x.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but its mask has {tuple(mask.shape)}: they must be equal, "
                "broadcasting would count the wrong positions. Slice or expand one of them first."
            )


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Shift and scale x to zero mean and unit variance over the True positions of all ranks.

    A collective: once torch.distributed is initialised every rank of the group must call it, also with an empty
    mask. The variance is the population variance (÷ n): "unit variance over the valid tokens" then holds exactly,
    and a single token does not give 0/0. The unbiased one (÷ n − 1) differs by √(n/(n−1)), negligible at rollout
    size. Sums are float64 and two-pass, so a large mean loses no precision. The result has no autograd graph.

    Args:
        x: [...] float, this rank's part.
        mask: [...] bool, the shape of x, True where x counts.
        group: the ranks to share statistics with; None is the default group where torch.distributed is initialised,
            else this process alone.

    Returns:
        (x − mean) / √(var + 1e-8), shape of x, float32 (float64 for float64), 0 where mask is False. All zeros if a
        single position counts or all values are equal.

    Raises:
        ValueError: mask is not bool, or its shape is not that of x.
    """
    require_mask(mask, x=x)
    distributed = dist.is_available() and dist.is_initialized()
    values = torch.where(mask, x.double(), 0.0)
    count_and_sum = torch.stack([mask.sum().double(), values.sum()])
    if distributed:
        dist.all_reduce(count_and_sum, group=group)
    count = count_and_sum[0].clamp(min=1)
    centred = torch.where(mask, values - count_and_sum[1] / count, 0.0)
    squares = centred.square().sum()
    if distributed:
        dist.all_reduce(squares, group=group)
    return (centred * torch.rsqrt(squares / count + 1e-8)).to(at_least_float32(x).dtype)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Position ids independent of padding on either side: the number of real tokens before each real token.

    Args:
        attention_mask: [B, S] bool, True on real tokens.

    Returns:
        [B, S] long; 0 on padding, which keeps it a valid index of any position table.

    Raises:
        ValueError: attention_mask is not bool.
    """
    require_mask(attention_mask)
    return torch.where(attention_mask, attention_mask.long().cumsum(dim=-1) - 1, 0)


def logprobs_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label under softmax(logits).

    Args:
        logits: [..., V] float, any precision.
        labels: [...] long in [0, V); masked positions need a valid id too (such as 0).

    Returns:
        [...] float32 (float64 for float64), in nats.
    """
    # log_softmax, not logit − logsumexp: the latter loses precision for large logits.
    return F.log_softmax(at_least_float32(logits), dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_size: int | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    with_top: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Log-probs of labels (and entropies) from hidden states, with a few copies of one block of logits in memory.

    logits = scale·(h·Wᵀ + b), then softcap·tanh(logits / softcap) if softcap is given, then ÷ temperature; the
    product in the weight's dtype, everything after it in float32. No logits are kept: backward computes them again, so
    `weight` must keep its values until backward has run. With N = 0 the result still depends on hidden, weight and bias
    (zero gradients, not None), as gradient collectives require. It can be differentiated once.

    Args:
        hidden: [N, H] float, only rows that count: a NaN row would make the gradient of weight NaN.
        weight: [V, H] float, the output head.
        labels: [N] long in [0, V).
        bias: [V] float, of the head.
        temperature: > 0, that of the distribution the labels were sampled from.
        with_entropy: also return the entropy of each row's distribution; tokens of probability 0 (a bias of −inf)
            contribute neither to it nor to a gradient.
        chunk_size: size of a block, as the number of whole rows [V] that have as many logits, ≥ 1. None: a block of
            LOGIT_BLOCK_BYTES (of the device, in float32).
        scale: multiplies the logits (a model's logit_scale, or 1 / logits_scaling).
        softcap: the model's final_logit_softcapping; None: no softcapping.
        with_top: also return whether each label has the largest logit (ties count as True).

    Returns:
        logprobs [N], or a tuple of logprobs [N], if wanted entropy [N], and if wanted is_top [N] bool: float32 (float64
        for float64), in nats.

    Raises:
        ValueError: temperature or chunk_size out of range.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}, but logits are divided by it, so it must be > 0: "
            "for greedy decoding use temperature 1.0."
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(
            f"chunk_size is {chunk_size} rows of logits, but at least 1 is needed: leave it out for the default."
        )
    if chunk_size is None:
        block_size = LOGIT_BLOCK_BYTES["cpu" if hidden.device.type == "cpu" else "accelerator"] // 4
    else:
        block_size = chunk_size * weight.shape[0]
    transform = LogitTransform(temperature=temperature, scale=scale, softcap=softcap)
    logprobs, entropy, is_top = SoftmaxHead.apply(hidden, weight, bias, labels, transform, with_entropy, block_size)
    outputs = (logprobs, *([entropy] if with_entropy else []), *([is_top] if with_top else []))
    return outputs if len(outputs) > 1 else logprobs


_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor | int, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox-4x32-10: a keyed bijection of 128-bit counters whose outputs are statistically independent random bits.

    Args:
        counter: four 32-bit words in [0, 2³²), long tensors that broadcast, or ints.
        key: two 32-bit words.

    Returns:
        Four long tensors of 32-bit words.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Random123).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2⁶⁴, and shifting then masking reads the high word as if unsigned.
        p0, p1 = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD, ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _PHILOX_KEY_STEPS[0]) & _WORD, (k1 + _PHILOX_KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def seeded_uniform(seed: int, iteration: int, sample_ids: Tensor, position: Tensor | int) -> Tensor:
    """One uniform number per (seed, iteration, sample id, position), the same on every device and in every batch.

    There is no generator state, so batch order, batch size, world size and resuming change nothing. About 120 small
    operations: a decoder saves kernel launches by one call with [B, 1] sample ids and [T] positions.

    Args:
        seed: any integer; its low 64 bits are used.
        iteration: rollout number in [0, 2³²).
        sample_ids: [B] long (or any shape that broadcasts with position), unique over the rollout of all ranks.
        position: [B] long, or an int: index of the token in the response, in [0, 2³²).

    Returns:
        [B] float32 (or the broadcast shape), each an odd multiple of 2⁻²⁴ strictly between 0 and 1.
    """
    counter = (position & _WORD, sample_ids & _WORD, (sample_ids >> 32) & _WORD, iteration & _WORD)
    return open_unit_interval(philox(counter, (seed & _WORD, (seed >> 32) & _WORD))[0])


def open_unit_interval(words: Tensor) -> Tensor:
    """Map 32-bit words (long, in [0, 2³²)) to float32 numbers strictly between 0 and 1."""
    # 23 bits plus one half: with 24 bits the largest value would round to 1.0 in float32.
    return ((words >> 9).float() + 0.5) * 2.0**-23
