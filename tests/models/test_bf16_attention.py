"""bf16 attention on a CPU: torch's outputs bit for bit, and gradients as close to float32 as torch's or closer."""

import pytest
import torch
from torch.nn import functional as F

from dschat.models import bf16_attention

MASK = torch.ones(2, 1, 5, 9, dtype=torch.bool).tril(diagonal=4)
MASK[1, :, :, :2] = False  # a shorter prefix


@pytest.mark.parametrize("mask", [None, MASK], ids=["causal", "mask"])
def test_outputs_are_torchs_and_gradients_are_no_further_from_float32(mask):
    generator = torch.Generator().manual_seed(0)
    keys = 5 if mask is None else 9
    # [B, L, H, D] in memory, as projections make them.
    exact = [torch.randn(2, n, 3, 8, generator=generator).bfloat16().float() for n in (5, keys, keys, 5)]
    weights = exact.pop()

    def run(attend, dtype):
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in exact]
        out = attend(*(leaf.transpose(1, 2) for leaf in leaves))
        out.backward(weights.to(dtype).transpose(1, 2))
        return out.detach(), [leaf.grad.float() for leaf in leaves]

    def torchs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=0.4)

    def ours(q, k, v):
        assert bf16_attention.is_faster(q, k, v, dropout=0.0)
        return bf16_attention.attention(q, k, v, mask, scale=0.4)

    _, gradients = run(torchs, torch.float32)
    (expected, torch_gradients), (out, our_gradients) = run(torchs, torch.bfloat16), run(ours, torch.bfloat16)
    assert torch.equal(out, expected)
    for gradient, theirs, mine in zip(gradients, torch_gradients, our_gradients, strict=True):
        assert (mine - gradient).norm() <= 1.1 * (theirs - gradient).norm() <= 0.02 * gradient.norm()


def test_only_bf16_training_on_a_cpu_takes_this_path():
    x = torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    assert bf16_attention.is_faster(x, x, x, dropout=0.0)
    assert not bf16_attention.is_faster(x, x, x, dropout=0.1)
    assert not bf16_attention.is_faster(x.detach(), x.detach(), x.detach(), dropout=0.0)
    assert not bf16_attention.is_faster(x.float(), x.float(), x.float(), dropout=0.0)
    with torch.no_grad():
        assert not bf16_attention.is_faster(x, x, x, dropout=0.0)
