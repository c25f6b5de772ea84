"""Log-probs and entropies from blocks of logits: derivatives, precision, memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from allocated_bytes import AllocatedBytes
from torch import Tensor

from dschat.softmax_head import LogitTransform, SoftmaxHead
from dschat.tensors import linear_logprobs

TRANSFORMS = {
    "plain": LogitTransform(),
    "temperature": LogitTransform(temperature=0.7),
    "scale": LogitTransform(scale=0.25),
    "softcap": LogitTransform(temperature=1.3, scale=1.7, softcap=3.0),
}


def leaves(n: int, h: int, v: int, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """hidden [N, H], weight [V, H], bias [V], labels [N]."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, h), (v, h), (v,)]
    floats = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    return [*(x.requires_grad_() for x in floats), torch.randint(0, v, (n,), generator=generator)]


@pytest.mark.parametrize("block_size", [1, 20, 1000])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_are_the_derivatives(transform, with_entropy, block_size):
    hidden, weight, bias, labels = leaves(5, 3, 7)

    def outputs(*floats: Tensor) -> tuple[Tensor, ...]:
        results = SoftmaxHead.apply(*floats, labels, TRANSFORMS[transform], with_entropy, block_size)
        return tuple(result for result in results[:2] if result is not None)

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_input_does_not_change_the_gradients_of_the_others(frozen):
    *floats, labels = leaves(5, 3, 7)
    trained = [x for index, x in enumerate(floats) if index != frozen]
    everything = torch.autograd.grad(linear_logprobs(*floats[:2], labels, bias=floats[2]).sum(), floats)
    floats[frozen] = floats[frozen].detach()
    some = torch.autograd.grad(linear_logprobs(*floats[:2], labels, bias=floats[2]).sum(), trained)
    torch.testing.assert_close(list(some), [x for index, x in enumerate(everything) if index != frozen])


@pytest.mark.parametrize("chunk_size", [1, 8, None])
def test_float32_results_equal_those_of_autograd_over_the_full_logits(chunk_size):
    hidden, weight, bias, labels = leaves(96, 16, 211, dtype=torch.float32)
    options = {"bias": bias, "temperature": 0.8, "with_entropy": True, "chunk_size": chunk_size}
    logprobs, entropy = linear_logprobs(hidden, weight, labels, **options)
    log_p = F.log_softmax(F.linear(hidden, weight, bias) / 0.8, dim=-1)
    expected = [log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)]
    torch.testing.assert_close([logprobs, entropy], expected, rtol=1e-6, atol=2e-6)
    factors = torch.randn(2, 96, generator=torch.Generator().manual_seed(1))
    gradients, reference = (
        torch.autograd.grad((factors[0] * x + factors[1] * y).sum(), (hidden, weight, bias))
        for x, y in ((logprobs, entropy), expected)
    )
    torch.testing.assert_close(gradients, reference, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("block_size", [2, 1000])
def test_large_logits_lose_no_digits(block_size):
    """Logits 30000, 29999, 29998, the largest last: log(e⁻² + e⁻¹ + 1) = 0.40760596."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[29998.0], [29999.0], [30000.0]])
    labels = torch.tensor([2, 0])
    logprobs, entropy, is_top = SoftmaxHead.apply(hidden, weight, None, labels, LogitTransform(), True, block_size)
    torch.testing.assert_close(logprobs, torch.tensor([-0.40760596, -2.40760596]), rtol=1e-6, atol=0)
    # 0.40760596 + (2·e⁻² + e⁻¹) / (e⁻² + e⁻¹ + 1)
    torch.testing.assert_close(entropy, torch.tensor([0.83239556, 0.83239556]), rtol=1e-6, atol=0)
    assert is_top.tolist() == [True, False]


def test_gradients_of_a_half_precision_head_are_rounded_once_however_small_the_blocks():
    hidden, weight, bias, labels = leaves(512, 8, 64, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    logits = F.linear(hidden, weight, bias)
    log_p = F.log_softmax(logits.double() + (F.linear(*exact) - F.linear(*exact).detach()), dim=-1)
    expected = torch.autograd.grad(log_p.gather(-1, labels[:, None]).sum(), exact)
    actual = torch.autograd.grad(
        linear_logprobs(hidden, weight, labels, bias=bias, chunk_size=1).sum(), (hidden, weight, bias)
    )
    for mine, exactly in zip(actual, expected, strict=True):
        error = (mine.double() - exactly).norm() / exactly.norm()
        assert error < 2**-8  # one rounding of the logits' gradient and one of the result, 2⁻⁹ at most each


def extra_bytes(logprobs: Callable[[Tensor, Tensor, Tensor], Tensor], *, dtype: torch.dtype) -> int:
    """Peak of what forward and backward allocate for 4096 tokens and a vocabulary of 152064."""
    hidden, weight = (torch.empty(x, 896, dtype=dtype, device="meta", requires_grad=True) for x in (4096, 152064))
    with AllocatedBytes() as allocated:
        logprobs(hidden, weight, torch.empty(4096, dtype=torch.long, device="meta")).sum().backward()
    return allocated.peak


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_log_probs_take_at_most_a_quarter_of_the_memory_of_full_logits(dtype):
    def full(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.log_softmax(F.linear(hidden, weight).float(), dim=-1).gather(-1, labels[:, None])

    naive = extra_bytes(full, dtype=dtype)
    assert naive > 2 * 4 * 4096 * 152064  # the measurement sees the logits and their gradient
    assert extra_bytes(linear_logprobs, dtype=dtype) <= naive / 4
    assert (
        extra_bytes(lambda *args: sum(linear_logprobs(*args, with_entropy=True, softcap=30.0)), dtype=dtype)
        <= naive / 4
    )


@pytest.mark.parametrize("chunk_size", [64, None])
def test_a_forward_pass_allocates_a_few_copies_of_one_block(chunk_size):
    hidden, weight = (torch.empty(x, 64, dtype=torch.bfloat16, device="meta") for x in (4096, 152064))
    labels = torch.empty(4096, dtype=torch.long, device="meta")
    with AllocatedBytes() as allocated:
        linear_logprobs(hidden, weight, labels, with_entropy=True, chunk_size=chunk_size)
    block = 64 << 20 if chunk_size is None else 4 * chunk_size * 152064
    rows = 4 * 4096
    # A float32 block while the next is computed in bf16 and copied to float32.
    assert block <= allocated.peak <= 2.5 * block + 20 * rows
