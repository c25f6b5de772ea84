"""Attention over packed rows on a CPU: torch's flash kernel on each bucket.

It gives the outputs of scaled_dot_product_attention over the same buckets bit for bit. Gradients are computed in
float32 also for bf16: the kernel's backward pass in bf16 is slower, and rounds more. Padded rows are gathered and
written back by index in both directions, since the gradient of padding is 0: autograd would add up zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dschat.models.packed_layout import Bucket, PackedLayout

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def supports(query: Tensor, value: Tensor, *, dropout: float) -> bool:
    """Whether these [H, N, D] tensors can be run by `attention`."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16)
        and dropout == 0
        and query.shape[-1] == value.shape[-1]
    )


def attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, masks: Sequence[Tensor | None], *, scale: float
) -> Tensor:
    """As PackedLayout.attention with softmax(scale · q kᵀ) v.

    Args:
        query: [H, N, D]; key, value: [G, N, D], H a multiple of G; float32 or bf16.
        masks: of `layout.masks`.

    Returns: [H, N, D]; contiguous as [N, H, D].
    """
    tokens_first = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return _PackedAttention.apply(*tokens_first, layout, masks, scale).transpose(0, 1)


class _PackedAttention(torch.autograd.Function):
    """Tensors are [N, H, D] outside of the kernel, [B, H, L, D] inside."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, masks: Sequence[Tensor | None], scale: float
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        logsumexps = []
        for bucket, tokens, mask in _buckets(layout, masks):
            parts = _padded_parts(bucket, tokens, q, k, v)
            part, logsumexp = _forward(*parts, 0.0, mask is None, attn_mask=_additive(mask, q.dtype), scale=scale)
            out[tokens] = _real(bucket, part)
            logsumexps.append(logsumexp)
        ctx.save_for_backward(q, k, v, out, *logsumexps)
        ctx.layout, ctx.masks, ctx.scale = layout, masks, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *logsumexps = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        shared = any(bucket.keys is not None for bucket in ctx.layout.buckets)
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)] if shared else []
        for (bucket, tokens, mask), logsumexp in zip(_buckets(ctx.layout, ctx.masks), logsumexps, strict=True):
            parts = _padded_parts(bucket, tokens, q, k, v)
            grad_out, part = _padded_gradient(bucket, grad[tokens]), _padded(bucket, out[tokens])
            d_q, d_k, d_v = _backward(
                *(tensor.float() for tensor in (grad_out, *parts, part)), logsumexp, 0.0, mask is None,
                attn_mask=_additive(mask, torch.float32), scale=ctx.scale,
            )  # fmt: skip
            grad_q[tokens] = _real(bucket, d_q)
            if bucket.keys is not None:
                for total, gradient in zip(sums, (d_k, d_v), strict=True):
                    total.index_add_(0, bucket.keys, gradient.transpose(1, 2).flatten(0, 1))
            elif shared:
                for total, gradient in zip(sums, (d_k, d_v), strict=True):
                    total[tokens] += _real(bucket, gradient)
            else:
                grad_k[tokens], grad_v[tokens] = _real(bucket, d_k), _real(bucket, d_v)
        if shared:
            grad_k, grad_v = (total.to(k.dtype) for total in sums)
        return grad_q, grad_k, grad_v, None, None, None


def _buckets(layout: PackedLayout, masks: Sequence[Tensor | None]) -> Iterator[tuple[Bucket, slice, Tensor | None]]:
    """Each bucket, its tokens in the packed row, and its mask."""
    start = 0
    for bucket, mask in zip(layout.buckets, masks, strict=True):
        yield bucket, slice(start, start + bucket.tokens), mask
        start += bucket.tokens


def _padded_parts(bucket: Bucket, tokens: slice, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a bucket, [rows, H, columns, D] and [rows, G, prefix + columns, D]."""
    if bucket.keys is None:
        return _padded(bucket, q[tokens]), _padded(bucket, k[tokens]), _padded(bucket, v[tokens])
    keys, values = (_rows(bucket, tensor.index_select(0, bucket.keys)) for tensor in (k, v))
    return _padded(bucket, q[tokens]), keys, values


def _padded(bucket: Bucket, part: Tensor) -> Tensor:
    """[tokens, H, D] → [rows, H, columns, D]; padding repeats a token."""
    return _rows(bucket, part if bucket.queries is None else part.index_select(0, bucket.queries))


def _padded_gradient(bucket: Bucket, part: Tensor) -> Tensor:
    """As _padded, with zeros as padding."""
    if bucket.real is None:
        return _rows(bucket, part)
    padded = part.new_zeros(len(bucket.prefixes) * bucket.columns, *part.shape[1:])
    return _rows(bucket, padded.index_copy_(0, bucket.real, part))


def _rows(bucket: Bucket, part: Tensor) -> Tensor:
    return part.unflatten(0, (len(bucket.prefixes), -1)).transpose(1, 2)


def _real(bucket: Bucket, padded: Tensor) -> Tensor:
    """[rows, H, columns, D] → [tokens, H, D] without padding."""
    part = padded.transpose(1, 2).flatten(0, 1)
    return part if bucket.real is None else part.index_select(0, bucket.real)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if mask is None else torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
