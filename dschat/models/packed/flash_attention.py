"""Attention inside the sequences of a packed row on CUDA, by torch's flash kernels for sequences of any lengths.

Segments attend to themselves in one call; those that go on from a prompt attend to it in a second one. The two results
are one softmax: each is weighted by its share of the denominator (Milakov & Gimelshein 2018, arXiv:1805.02867). For the
same reason a backward pass of each with the common result and denominator gives its part of the gradient.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dschat.models.packed.layout import PackedLayout, Segment, VariableLengths
from dschat.models.packed.rectangular_attention import sdpa

logger = logging.getLogger(__name__)
aten = torch.ops.aten

LARGEST_WIDTH, WIDTH_MULTIPLE = 256, 8  # of a head, for the kernels
_TRIAL_SEGMENTS = (Segment(0, 37), Segment(37, 5, (0, 37)), Segment(42, 19, (0, 37)), Segment(61, 70))


def attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, *, window: int | None, scale: float
) -> Tensor:
    """softmax(scale · q kᵀ) v of each segment over its prefix and itself, causal; differentiable.

    Args:
        query: [H, N, D]; key, value: [G, N, D], H a multiple of G; bfloat16 or float16 on CUDA.
        window: number of last positions that each position attends to, itself included; None: all. Not together with
            prefixes, whose positions the kernels do not know.

    Returns: [H, N, D]; contiguous as [N, H, D].
    """
    tokens_first = (tensor.transpose(0, 1).contiguous() for tensor in (query, key, value))
    return _FlashAttention.apply(*tokens_first, layout.variable_lengths, window, scale).transpose(0, 1)


def supports(query: Tensor, value: Tensor) -> bool:
    """Whether `attention` can run these [H, N, D] tensors; the first call of a kind tries the kernels on its device."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and value.shape[-1] == width <= LARGEST_WIDTH
        and width % WIDTH_MULTIPLE == 0
        and works(query.device, query.dtype, width)
    )


@functools.cache
def works(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the kernels give the outputs and gradients of torch's attention here; otherwise the log says why not."""
    layout = PackedLayout(_TRIAL_SEGMENTS, device)
    generator = torch.Generator().manual_seed(0)
    tokens = sum(segment.length for segment in _TRIAL_SEGMENTS)
    inputs = [torch.randn(heads, tokens, width, generator=generator).to(device, dtype) for heads in (4, 2, 2, 4)]
    scale = width**-0.5
    attend = functools.partial(sdpa, scale=scale, dropout=0.0)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            actual = _outputs_and_gradients(inputs, lambda *x: attention(*x, layout, window=None, scale=scale))
            expected = _outputs_and_gradients(
                inputs, lambda *x: layout.attention(*x, masks=layout.masks(None), attend=attend)
            )
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True))
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # no kernel for this device, or another interface in this version of torch
        logger.warning("packed rows attend without flash kernels (%s: %s)", type(problem).__name__, problem)
        return False
    tolerance = 4 * torch.finfo(dtype).eps
    if not error <= tolerance:
        logger.warning("packed rows attend without flash kernels: they differ by %.2g (%.2g allowed)", error, tolerance)
    return error <= tolerance


def _outputs_and_gradients(inputs: list[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
    *parts, direction = (tensor.clone().requires_grad_() for tensor in inputs)
    out = attend(*parts)
    return [tensor.detach().float() for tensor in (out, *torch.autograd.grad(out, parts, direction.detach()))]


class _FlashAttention(torch.autograd.Function):
    """Tensors are [N, H, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: VariableLengths, window: int | None, scale: float
    ) -> Tensor:
        out, logsumexp, *random = _run_forward(q, k, v, _own_arguments(lengths, window, scale))
        if lengths.queries is not None:
            parts = q[lengths.queries], k[lengths.keys], v[lengths.keys]
            prefix_out, prefix_logsumexp, *_ = _run_forward(*parts, _prefix_arguments(lengths, scale))
            own = logsumexp[:, lengths.queries]
            total = torch.logaddexp(own, prefix_logsumexp)
            shares = ((x - total).exp().t()[..., None] for x in (own, prefix_logsumexp))  # each [M, H, 1]
            both = sum(share * part for share, part in zip(shares, (out[lengths.queries], prefix_out), strict=True))
            out[lengths.queries] = both.to(out.dtype)
            logsumexp[:, lengths.queries] = total
        ctx.save_for_backward(q, k, v, out, logsumexp, *random)
        ctx.lengths, ctx.window, ctx.scale = lengths, window, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp, rng_state, unused = ctx.saved_tensors
        lengths, grad = ctx.lengths, grad.contiguous()
        no_dropout = {"rng_state": rng_state, "unused": unused}
        gradients = aten._flash_attention_backward(
            grad, q, k, v, out, logsumexp, **no_dropout, **_own_arguments(lengths, ctx.window, ctx.scale)
        )
        if lengths.queries is not None:
            chosen, keys = lengths.queries, lengths.keys
            prefix = aten._flash_attention_backward(
                grad[chosen], q[chosen], k[keys], v[keys], out[chosen], logsumexp[:, chosen].contiguous(),
                **no_dropout, **_prefix_arguments(lengths, ctx.scale),
            )  # fmt: skip
            for total, part, index in zip(gradients, prefix, (chosen, keys, keys), strict=True):
                total.index_add_(0, index, part)
        return *gradients, None, None, None


def _own_arguments(lengths: VariableLengths, window: int | None, scale: float) -> dict[str, Any]:
    """Of a kernel call in which every segment attends to itself."""
    return _arguments(lengths.own_ends, lengths.own_ends, lengths.longest_own, lengths.longest_own, scale) | {
        "is_causal": True, "window_size_left": None if window is None else window - 1,
    }  # fmt: skip


def _prefix_arguments(lengths: VariableLengths, scale: float) -> dict[str, Any]:
    """Of a kernel call in which the segments of each prompt attend to all of it."""
    return _arguments(
        lengths.query_ends, lengths.key_ends, lengths.longest_query, lengths.longest_key, scale
    ) | {"is_causal": False}  # fmt: skip


def _arguments(query_ends: Tensor, key_ends: Tensor, longest_query: int, longest_key: int, scale: float) -> dict:
    return {
        "cum_seq_q": query_ends, "cum_seq_k": key_ends, "max_q": longest_query, "max_k": longest_key, "scale": scale,
        "dropout_p": 0.0,
    }  # fmt: skip


def _run_forward(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """out [N, H, D], logarithm of the denominators [H, N] float32, and two tensors that the backward pass wants."""
    out, logsumexp, rng_state, unused, _ = aten._flash_attention_forward(q, k, v, return_debug_mask=False, **arguments)
    if logsumexp.shape != (q.shape[1], q.shape[0]):
        raise NotImplementedError(f"the kernel's log-sum-exp is {tuple(logsumexp.shape)}")
    return out, logsumexp, rng_state, unused
