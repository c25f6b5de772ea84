"""Log-probs and entropies of a softmax over a linear layer, in blocks of its logits: pure torch, no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# exp of it is 0, as of −inf, in float32 and float64; but its product with that 0 is 0, not NaN.
_LOWEST_LOGPROB = -1e4


@dataclass(frozen=True)
class LogitTransform:
    """From the outputs x of a linear layer to logits: scale·x, softcap·tanh(… / softcap) if given, … / temperature."""

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    # One factor per step, in place: each merged division saves a pass over the logits.

    def logits_(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits, and with softcap the tanh in them, whose slope `gradient_` needs; overwrites x [N, v]."""
        if self.softcap is not None:
            tanh = x.mul_(self.scale / self.softcap).tanh_()
            return tanh * (self.softcap / self.temperature), tanh
        factor = self.scale / self.temperature
        return x if factor == 1 else x.mul_(factor), None

    def gradient_(self, gradient: Tensor, tanh: Tensor | None) -> Tensor:
        """Gradient with respect to x from that with respect to the logits [N, v]; overwrites both arguments."""
        if tanh is not None:
            gradient.mul_(tanh.square_().neg_().add_(1.0))
        factor = self.scale / self.temperature
        return gradient if factor == 1 else gradient.mul_(factor)


@dataclass(frozen=True)
class LogitBlocks:
    """The logits z [N, V] of hidden states, computed in blocks of columns.

    Attributes:
        size: logits in a block, at least one column.
    """

    states: Tensor  # [N, H], in the weight's dtype
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    labels: Tensor  # [N]
    transform: LogitTransform
    size: int

    def columns(self) -> Iterator[slice]:
        """The columns of each block."""
        width = max(1, self.size // max(1, self.states.shape[0]))
        total = self.weight.shape[0]
        return (slice(start, min(start + width, total)) for start in range(0, total, width))

    def logits(self, columns: slice) -> tuple[Tensor, Tensor | None]:
        """[N, v] logits of a block in at least float32, and their tanh; see LogitTransform."""
        x = F.linear(self.states, self.weight[columns], None if self.bias is None else self.bias[columns])
        return self.transform.logits_(x.to(torch.promote_types(x.dtype, torch.float32)))

    def label_position(self, columns: slice) -> tuple[Tensor, Tensor]:
        """[N, 1] column of each row's label in a block (any if it is in another), and [N, 1] bool, True if in this."""
        column, width = (self.labels - columns.start)[:, None], columns.stop - columns.start
        return column.clamp(0, width - 1), (column >= 0) & (column < width)


class SoftmaxHead(torch.autograd.Function):
    """Log-prob of the label and entropy of each row of p = softmax(z), with one block of the logits z in memory.

    Forward merges the blocks' maxima m and sums Z = Σ exp(z − m), E = Σ exp(z − m)·(z − m) (Milakov & Gimelshein
    2018, algorithm 3, arXiv:1805.02867). They are saved, and backward computes each block of p from them:

        log p_j = z_j − m − log Z,    H = −Σ p_j·log p_j = log Z − E / Z
        with upstream gradients g of log p_label and h of H:    dz_j = g·[j = label] − p_j·(g + h·(log p_j + H))

    Blocks are columns, not rows: each row of the weight is then read once, and its gradient is written once, not summed
    over blocks in half precision.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, transform: LogitTransform,
        with_entropy: bool, block_size: int,
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        """[N] log-probs and [N] entropies (or None), in at least float32; [N] bool, True if no logit is larger."""
        blocks = LogitBlocks(hidden.to(weight.dtype), weight, bias, labels, transform, block_size)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        m = hidden.new_full((hidden.shape[0], 1), torch.finfo(dtype).min, dtype=dtype)  # [N, 1]
        z_label, Z, E = (torch.zeros_like(m) for _ in range(3))
        for columns in blocks.columns():
            z = blocks.logits(columns)[0]  # [N, v]
            column, inside = blocks.label_position(columns)
            z_label += z.gather(1, column).where(inside, 0.0)
            old_m, m = m, torch.maximum(m, z.amax(dim=1, keepdim=True))
            sum_exp, sum_products = exponential_sums_(z.sub_(m), with_products=with_entropy)
            change = old_m - m
            E = change.exp() * (E + change * Z) + sum_products
            Z = change.exp() * Z + sum_exp
        log_Z = Z.log()
        entropy = log_Z - E / Z if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, labels, m, Z, entropy)
        ctx.transform, ctx.block_size = transform, block_size
        # The difference of the logits first: added to a large m, the logarithm would lose its digits.
        logprobs = z_label - m - log_Z
        is_top = (z_label >= m).squeeze(1)
        ctx.mark_non_differentiable(is_top)
        return logprobs.squeeze(1), entropy.squeeze(1) if with_entropy else None, is_top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor, d_entropy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weight and bias, as far as they are needed."""
        hidden, weight, bias, labels, m, Z, entropy = ctx.saved_tensors
        blocks = LogitBlocks(hidden.to(weight.dtype), weight, bias, labels, ctx.transform, ctx.block_size)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros_like(hidden, dtype=m.dtype) if needs_hidden else None
        d_weight = torch.empty_like(weight) if needs_weight else None
        d_bias = torch.empty_like(bias) if needs_bias else None
        # dz_j = g·[j = label] + (a + b·(z_j − m))·exp(z_j − m)
        g, b = d_logprobs[:, None], None
        a = -g / Z
        if entropy is not None:
            b = -d_entropy[:, None] / Z
            a = a + b * (entropy - Z.log())

        def gradient_of_outputs(columns: slice) -> Tensor:  # [N, v]; returning frees the other copies of the block
            z, tanh = blocks.logits(columns)
            dz = slope_(z.sub_(m), a, b)
            column, inside = blocks.label_position(columns)
            dz.scatter_add_(1, column, g.where(inside, 0.0))
            return ctx.transform.gradient_(dz, tanh).to(weight.dtype)

        for columns in blocks.columns():
            dx = gradient_of_outputs(columns)
            if d_hidden is not None:
                d_hidden += dx @ weight[columns]
            if d_weight is not None:
                torch.mm(dx.t(), blocks.states, out=d_weight[columns])
            if d_bias is not None:
                d_bias[columns] = dx.sum(dim=0)
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


def exponential_sums_(z: Tensor, *, with_products: bool) -> tuple[Tensor, Tensor | float]:
    """Σ exp(z) and Σ exp(z)·z (or 0.0 if not wanted) of each row, [N, 1]; overwrites z ≤ 0 [N, v]."""
    if not with_products:
        return z.exp_().sum(dim=1, keepdim=True), 0.0
    exp = z.exp()
    return exp.sum(dim=1, keepdim=True), z.clamp_(min=_LOWEST_LOGPROB).mul_(exp).sum(dim=1, keepdim=True)


def slope_(z: Tensor, a: Tensor, b: Tensor | None) -> Tensor:
    """(a + b·z)·exp(z), or a·exp(z) without b; overwrites z ≤ 0 [N, v]."""
    if b is None:
        return z.exp_().mul_(a)
    exp = z.exp()
    return z.clamp_(min=_LOWEST_LOGPROB).mul_(b).add_(a).mul_(exp)
