"""Norms, gates and rotary embeddings in C++ against their definitions in float64, with their gradients."""

import pytest
import torch
from torch import nn

from dschat.models.cpu import layer_kernels


@pytest.fixture(scope="module")
def kernels() -> layer_kernels.LayerKernels:
    loaded = layer_kernels.load()
    assert loaded is not None, "the tests need a compiler"
    return loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 24, 100, 688])
def test_norms_gates_and_rotations_equal_their_definitions(kernels, dtype, width):
    generator = torch.Generator().manual_seed(width)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    close = {"rtol": 2**-7, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    x, weight = random(3, 5, width), random(width)
    for eps, shift in ((1e-6, 0.0), (1e-1, 1.0)):
        wide = x.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + shift)
        actual = kernels.rms_norm(x.transpose(0, 1), weight, eps=eps, shift=shift).transpose(0, 1)
        torch.testing.assert_close(actual.double(), expected, **close)

    both = 6 * random(4, 1, 2 * width)
    gate, up = both.split(width, dim=-1)  # as a product of two layers leaves them
    for gelu in (False, True):
        act = nn.functional.gelu(gate.double(), approximate="tanh") if gelu else nn.functional.silu(gate.double())
        torch.testing.assert_close(kernels.gated(gate, up, gelu=gelu).double(), act * up.double(), **close)

    heads = random(2, 7, 3, width).transpose(1, 2)  # [R, H, T, D], as models make them
    for rows in (1, 2):
        cos, sin = random(rows, 7, width), random(rows, 7, width)
        half = torch.cat([-heads[..., width // 2 :], heads[..., : width // 2]], dim=-1)
        expected = heads.double() * cos[:, None].double() + half.double() * sin[:, None].double()
        torch.testing.assert_close(kernels.rotate(heads, cos, sin).double(), expected, **close)


def test_extreme_gates_are_finite(kernels):
    gate = torch.tensor([[-1e4, -88.0, 0.0, 88.0, 1e4]])
    for gelu in (False, True):
        expected = nn.functional.gelu(gate, approximate="tanh") if gelu else nn.functional.silu(gate)
        torch.testing.assert_close(kernels.gated(gate, torch.ones(1, 5), gelu=gelu), expected)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.gated(gate, torch.ones(1, 4))
    with pytest.raises(ValueError, match="rms_norm"):
        kernels.rms_norm(gate, torch.ones(4), eps=1e-6)
    with pytest.raises(ValueError, match="do not fit together"):
        kernels.rotate(torch.ones(2, 3, 4, 6), torch.ones(3, 4, 6), torch.ones(3, 4, 6))


def assert_same_gradients(kernel, definition, inputs, case):
    """Gradients of both for a random direction; the definition runs in float64 on the same values."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = definition(*wide)
    direction = torch.randn_like(expected).to(inputs[0].dtype)
    actual = torch.autograd.grad(kernel(*inputs), inputs, direction)
    expected = torch.autograd.grad(expected, wide, direction.double())
    relative = 1e-2 if inputs[0].dtype == torch.bfloat16 else 1e-6
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert ours.dtype == inputs[0].dtype and ours.shape == theirs.shape
        assert (ours.double() - theirs).norm() <= relative * theirs.norm(), (case, index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, width", [(1, 8), (7, 100), (600, 64)], ids=str)
def test_gradients_equal_those_of_the_definitions(kernels, dtype, rows, width):
    """600 rows are more than one thread's."""
    torch.manual_seed(rows)

    def random(*shape):
        return torch.randn(shape).to(dtype).requires_grad_()

    for eps, shift in ((1e-6, 0.0), (0.5, 1.0)):
        assert_same_gradients(
            lambda x, weight, eps=eps, shift=shift: kernels.rms_norm(x, weight, eps=eps, shift=shift),
            lambda x, w, eps=eps, shift=shift: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (w + shift),
            (random(rows, width), random(width)), ("norm", eps, shift),
        )  # fmt: skip
    for gelu in (False, True):
        assert_same_gradients(
            lambda gate, up, gelu=gelu: kernels.gated(3 * gate, up, gelu=gelu),
            lambda g, up, gelu=gelu: (nn.functional.gelu(3 * g, approximate="tanh") if gelu
                                      else nn.functional.silu(3 * g)) * up,
            (random(2, rows, width), random(2, rows, width)), ("gate", gelu),
        )  # fmt: skip
    cos, sin = torch.randn(1, rows, width).to(dtype), torch.randn(1, rows, width).to(dtype)

    def rotated(x):
        half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], dim=-1)
        return x * cos[:, None].double() + half * sin[:, None].double()

    assert_same_gradients(lambda x: kernels.rotate(x, cos, sin), rotated, (random(1, 3, rows, width),), "rotation")


def test_only_the_gradients_that_are_needed_are_computed(kernels):
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(8)
    out = kernels.rms_norm(x, weight, eps=1e-6)
    out.sum().backward()
    assert x.grad is not None and weight.grad is None
    with torch.no_grad():
        assert kernels.rms_norm(x, weight, eps=1e-6).grad_fn is None
    frozen = nn.Parameter(weight)
    kernels.rms_norm(x.detach(), frozen, eps=1e-6).sum().backward()
    assert frozen.grad is not None


def test_threads_change_nothing_but_the_order_of_a_sum(kernels):
    torch.manual_seed(0)
    x = torch.randn(900, 64, requires_grad=True)
    weight = torch.randn(64, requires_grad=True)
    threads = torch.get_num_threads()
    gradients = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            gradients.append(torch.autograd.grad(kernels.rms_norm(x, weight, eps=1e-6).square().sum(), (x, weight)))
    finally:
        torch.set_num_threads(threads)
    (one_x, one_weight), (three_x, three_weight) = gradients
    assert torch.equal(one_x, three_x)
    # Relative to the norm: a sum of 900 terms may cancel to any small number.
    assert (one_weight - three_weight).norm() <= 1e-6 * one_weight.norm()
