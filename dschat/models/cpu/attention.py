"""Attention inside the sequences of a packed row in C++, with its gradient."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dschat.models.cpu.library import DTYPES, FLAG, POINTER, REAL, CompiledLibrary, load_library
from dschat.models.packed.layout import SegmentGroups


class AttentionKernels(CompiledLibrary):
    """Attention over packed rows on float32 or bfloat16 CPU tensors, computed in float32, without padding."""

    def __init__(self) -> None:
        signatures = {
            "attention": [POINTER] * 9 + [REAL, FLAG, FLAG],
            "attention_backward": [POINTER] * 13 + [REAL, FLAG, FLAG],
        }
        super().__init__(Path(__file__).with_name("packed_attention.cpp"), signatures)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, groups: SegmentGroups, first: Tensor | None, *, scale: float
    ) -> Tensor:
        """softmax(scale · q kᵀ) v of each segment over its prefix and itself, causal; differentiable.

        Args:
            query: [H, N, D]; key, value: [G, N, D], [G, N, Dv], H a multiple of G; one dtype.
            groups: of the N tokens.
            first: [longest] long, first position of its sequence that each position attends to, not decreasing; None:
                the first one.

        Returns: [H, N, Dv]; contiguous as [N, H, Dv].
        """
        (heads, tokens, width), kv_heads = query.shape, key.shape[0]
        if not (
            query.dtype == key.dtype == value.dtype and query.dtype in DTYPES and query.device.type == "cpu"
            and key.shape[1:] == (tokens, width) and value.shape[:2] == (kv_heads, tokens) and heads % kv_heads == 0
            and groups.tokens == tokens and (first is None or first.dtype == torch.long and first.is_contiguous())
            and (first is None or len(first) >= groups.longest)
        ):  # fmt: skip
            shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in (query, key, value)]
            raise ValueError(f"attention: shapes and dtypes do not fit together: {shapes}, {groups.tokens} tokens")
        tokens_first = (tensor.transpose(0, 1) for tensor in (query, key, value))
        return _Attention.apply(*tokens_first, self, groups, first, scale).transpose(0, 1)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, groups: SegmentGroups, first: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """[N, H, Dv], and the logarithms of the softmax's denominators, [H, N] float32."""
        out, logsumexp = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        self._run(
            "attention", out.data_ptr(), logsumexp.data_ptr(), *(x.data_ptr() for x in (q, k, v)),
            *_description(q, k, v, groups, first, scale),
        )  # fmt: skip
        return out, logsumexp

    def _backward(
        self, grad: Tensor, out: Tensor, logsumexp: Tensor, q: Tensor, k: Tensor, v: Tensor, groups: SegmentGroups,
        first: Tensor | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        grad = grad.contiguous()
        gradients = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self._run(
            "attention_backward", *(x.data_ptr() for x in (*gradients, grad, out, logsumexp, q, k, v)),
            *_description(q, k, v, groups, first, scale),
        )  # fmt: skip
        return gradients


class _Attention(torch.autograd.Function):
    """Tensors are [N, H, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernels: AttentionKernels, groups: SegmentGroups,
        first: Tensor | None, scale: float,
    ) -> Tensor:  # fmt: skip
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, logsumexp = kernels._forward(q, k, v, groups, first, scale)
        ctx.save_for_backward(out, logsumexp, q, k, v)
        ctx.kernels, ctx.settings = kernels, (groups, first, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.kernels._backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None


def _description(
    q: Tensor, k: Tensor, v: Tensor, groups: SegmentGroups, first: Tensor | None, scale: float
) -> tuple[Any, ...]:
    """The last arguments of both functions."""
    sizes = (ctypes.c_int64 * 12)(
        len(groups.offsets) - 1, len(q), q.shape[1], k.shape[1], q.shape[2], v.shape[2], *q.stride()[:2],
        *k.stride()[:2], *v.stride()[:2],
    )  # fmt: skip
    return (
        sizes, groups.offsets.data_ptr(), groups.spans.data_ptr(), None if first is None else first.data_ptr(), scale,
        q.dtype == torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip


@functools.cache
def load() -> AttentionKernels | None:
    """The kernels, compiled if needed; None, with a warning, if they cannot be built."""
    return load_library(AttentionKernels, consequence="packed rows are padded for torch's attention, slower")
