"""RMS norms, gated activations and rotary embeddings in C++, each with its gradient."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dschat.models.cpu.library import (
    DTYPES,
    FLAG,
    INTEGER,
    POINTER,
    REAL,
    CompiledLibrary,
    load_library,
    thread_count,
)


class LayerKernels(CompiledLibrary):
    """Elementwise functions of decoder layers on float32 or bfloat16 CPU tensors, differentiable."""

    def __init__(self) -> None:
        sizes_and_flags = [INTEGER, INTEGER, REAL, REAL, FLAG, FLAG]
        signatures = {
            "rms_norm": [POINTER] * 3 + sizes_and_flags,
            "rms_norm_backward": [POINTER] * 5 + sizes_and_flags,
            "gated": [POINTER] * 3 + [INTEGER] * 4 + [FLAG] * 3,
            "gated_backward": [POINTER] * 5 + [INTEGER] + [FLAG] * 3,
            "rotate": [POINTER] * 5 + [FLAG] * 3,
        }
        super().__init__(Path(__file__).with_name("layer_kernels.cpp"), signatures)

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float, shift: float = 0.0) -> Tensor:
        """x / √(mean(x²) + eps) · (weight + shift) over the last dimension; x [..., D], weight [D] of x's dtype.

        Source: Zhang & Sennrich 2019 (arXiv:1910.07467), equation 4.
        """
        width = x.shape[-1]
        if not (x.dtype == weight.dtype and x.dtype in DTYPES and weight.shape == (width,) and weight.is_contiguous()):
            raise ValueError(f"rms_norm: x {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}")
        if _needs_grad(x, weight):
            return _RMSNorm.apply(x, weight, self, eps, shift)
        return self._rms_norm(x, weight, eps, shift)

    def gated(self, gate: Tensor, up: Tensor, *, gelu: bool = False) -> Tensor:
        """SiLU(gate) · up, or with the tanh form of GELU instead of SiLU; gate and up are [..., D].

        Source: Shazeer 2020 (arXiv:2002.05202), equation 6.
        """
        if not (gate.dtype == up.dtype and gate.dtype in DTYPES and gate.shape == up.shape):
            raise ValueError(f"gated: {gate.dtype} {tuple(gate.shape)} and {up.dtype} {tuple(up.shape)} do not fit")
        if _needs_grad(gate, up):
            return _Gated.apply(gate, up, self, gelu)
        return self._gated(gate, up, gelu)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary position embedding with a head's halves paired: x [R, H, T, D], cos and sin [R or 1, T, D].

        The gradient is that of x; cos and sin are constants.

        Source: Su et al. 2021 (arXiv:2104.09864), equation 34, pairs (i, i + D/2).
        """
        rows, _, tokens, width = x.shape
        if not (
            x.dtype == cos.dtype == sin.dtype and x.dtype in DTYPES and cos.shape == sin.shape and width % 2 == 0
            and cos.shape in ((rows, tokens, width), (1, tokens, width))
        ):  # fmt: skip
            shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in (x, cos, sin)]
            raise ValueError(f"rotate: shapes and dtypes do not fit together: {shapes}")
        if _needs_grad(x):
            return _Rotate.apply(x, cos, sin, self)
        return self._rotate(x, cos, sin)

    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
        x, width = x.contiguous(), len(weight)
        out = torch.empty_like(x)
        self._run(
            "rms_norm", out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.numel() // width, width, eps, shift,
            _is_bf16(x), thread_count(x.numel()),
        )  # fmt: skip
        return out

    def _rms_norm_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, eps: float, shift: float, *, of_weight: bool
    ) -> tuple[Tensor, Tensor | None]:
        grad, x, width = grad.contiguous(), x.contiguous(), len(weight)
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight) if of_weight else None
        self._run(
            "rms_norm_backward", grad_x.data_ptr(), None if grad_weight is None else grad_weight.data_ptr(),
            grad.data_ptr(), x.data_ptr(), weight.data_ptr(), x.numel() // width, width, eps, shift, _is_bf16(x),
            thread_count(x.numel()),
        )  # fmt: skip
        return grad_x, grad_weight

    def _gated(self, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        out, width = gate.new_empty(gate.shape), gate.shape[-1]
        gate, up = gate.reshape(-1, width), up.reshape(-1, width)  # views where rows are evenly spaced
        gate, up = (x if x.stride(-1) == 1 else x.contiguous() for x in (gate, up))
        self._run(
            "gated", out.data_ptr(), gate.data_ptr(), up.data_ptr(), len(gate), width, gate.stride(0), up.stride(0),
            gelu, _is_bf16(gate), thread_count(gate.numel()),
        )  # fmt: skip
        return out

    def _gated_backward(self, grad: Tensor, gate: Tensor, up: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
        grad, gate, up = (x.contiguous() for x in (grad, gate, up))
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        self._run(
            "gated_backward", grad_gate.data_ptr(), grad_up.data_ptr(), grad.data_ptr(), gate.data_ptr(),
            up.data_ptr(), gate.numel(), gelu, _is_bf16(gate), thread_count(gate.numel()),
        )  # fmt: skip
        return grad_gate, grad_up

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, transposed: bool = False) -> Tensor:
        """transposed: the gradient of x from that of the result."""
        rows, heads, tokens, width = x.shape
        x = x if x.stride(-1) == 1 else x.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        out = x.new_empty(rows, tokens, heads, width)
        sizes = (ctypes.c_int64 * 9)(
            rows, heads, tokens, width, *x.stride()[:3], tokens * width if len(cos) > 1 else 0, width
        )
        self._run(
            "rotate", out.data_ptr(), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), sizes, transposed, _is_bf16(x),
            thread_count(x.numel()),
        )  # fmt: skip
        return out.transpose(1, 2)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kernels: LayerKernels, eps: float, shift: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kernels, ctx.eps, ctx.shift = kernels, eps, shift
        return kernels._rms_norm(x, weight, eps, shift)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_weight = ctx.needs_input_grad[1]
        gradients = ctx.kernels._rms_norm_backward(grad, *ctx.saved_tensors, ctx.eps, ctx.shift, of_weight=of_weight)
        return *gradients, None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: LayerKernels, gelu: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels, ctx.gelu = kernels, gelu
        return kernels._gated(gate, up, gelu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.kernels._gated_backward(grad, *ctx.saved_tensors, ctx.gelu), None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, kernels: LayerKernels) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return kernels._rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.kernels._rotate(grad, *ctx.saved_tensors, transposed=True), None, None, None


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _is_bf16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


@functools.cache
def load() -> LayerKernels | None:
    """The kernels, compiled if needed; None, with a warning, if they cannot be built."""
    return load_library(LayerKernels, consequence="norms, gates and rotary embeddings run in torch's, slower")
