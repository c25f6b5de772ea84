"""Norms, gated feed-forward layers and rotary embeddings of a generation module on a CPU, each by one C++ kernel.

torch takes five to ten calls for each, and at the size of a decoding step the calls cost more than the arithmetic. What
a kernel can stand for is found by trying both on random numbers, so no architecture is known by name, and whatever
differs stays as it is.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from itertools import permutations, product

import torch
from torch import Tensor, nn

from dschat.generation import cpu_kernels
from dschat.generation.cpu_kernels import CPUKernels

ROTARY = "apply_rotary_pos_emb"  # what transformers' models call the function that rotates queries and keys
TRIAL_ROWS = 3


@torch.inference_mode()
def faster_forwards(model: nn.Module) -> dict[nn.Module, Callable]:
    """Forwards that give what the modules' own give, up to rounding; empty where there are no kernels."""
    if model.device.type != "cpu" or model.dtype not in cpu_kernels.DTYPES or (library := cpu_kernels.load()) is None:
        return {}
    found = {}
    rotations: dict[type, Rotary] = {}  # one for all layers of a class, so that it is tried once
    for module in model.modules():
        forward = _norm(module, library) or _gated(module, library) or _rotating(module, library, rotations)
        if forward is not None:
            found[module] = forward
    return found


def _norm(module: nn.Module, library: CPUKernels) -> Callable[[Tensor], Tensor] | None:
    """For a root-mean-square norm, its weight taken as it is or plus one."""
    weight = module._parameters.get("weight")
    if len(module._parameters) != 1 or module._modules or weight is None or weight.dim() != 1:
        return None
    epsilons = {value for value in vars(module).values() if isinstance(value, float)}
    x = _random(TRIAL_ROWS, len(weight), like=weight)
    for eps, shift in product(epsilons, (0.0, 1.0)):

        def forward(x: Tensor, eps: float = eps, shift: float = shift) -> Tensor:
            return library.rms_norm(x, module.weight, eps=eps, shift=shift)

        # With small numbers eps counts as much as they do.
        if all(_same(module, forward, scale * x) for scale in (1.0, 4 * eps**0.5)):
            return forward
    return None


def _gated(module: nn.Module, library: CPUKernels) -> Callable[[Tensor], Tensor] | None:
    """For down(act(gate(x)) * up(x)) with SiLU or GELU's tanh form."""
    linears = [child for child in module.children() if isinstance(child, nn.Linear)]
    if len(linears) != 3:
        return None
    for gate, up, down in permutations(linears):
        same_shape = gate.weight.shape == up.weight.shape == down.weight.shape[::-1]
        if not same_shape:
            continue
        x = 3 * _random(TRIAL_ROWS, gate.in_features, like=gate.weight)
        for gelu in (False, True):

            def forward(x: Tensor, gate=gate, up=up, down=down, gelu: bool = gelu) -> Tensor:
                return down(library.gated(gate(x), up(x), gelu=gelu))

            if _same(module, forward, x):
                return forward
    return None


def _rotating(module: nn.Module, library: CPUKernels, rotations: dict[type, Rotary]) -> Callable | None:
    """For attention whose code calls the usual function: the same code, with another function under its name."""
    forward = type(module).forward
    code = getattr(forward, "__code__", None)
    if code is None or ROTARY not in code.co_names or ROTARY not in forward.__globals__:
        return None
    if type(module) not in rotations:
        rotations[type(module)] = Rotary(forward.__globals__[ROTARY], library)
    names = {**forward.__globals__, ROTARY: rotations[type(module)]}
    copied = types.FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return partial(copied, module)


class Rotary:
    """Stands for a model's function: for shapes on which a trial shows the same, a kernel; else the function."""

    def __init__(self, plain: Callable, library: CPUKernels) -> None:
        self.plain, self.library = plain, library
        self.same: bool | None = None

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: object, **kwargs: object) -> object:
        fits = cos.dim() == 3 and q.dim() == k.dim() == 4 and q.shape[-1] == k.shape[-1] == cos.shape[-1]
        if args or kwargs or not fits or not q.dtype == k.dtype == cos.dtype:
            return self.plain(q, k, cos, sin, *args, **kwargs)
        if self.same is None:
            # Real angles would not do: at position 0 every form is the same.
            self.same = self._agrees(q.shape[-1], like=q)
        if not self.same:
            return self.plain(q, k, cos, sin)
        return self.library.rotate(q, cos, sin), self.library.rotate(k, cos, sin)

    def _agrees(self, width: int, *, like: Tensor) -> bool:
        q, k = _random(2, 3, 5, width, like=like), _random(2, 1, 5, width, like=like)
        cos, sin = _random(2, 5, width, like=like), _random(2, 5, width, like=like)
        try:
            expected = self.plain(q, k, cos, sin)
        except (RuntimeError, TypeError, ValueError):
            return False
        found = [self.library.rotate(x, cos, sin) for x in (q, k)]
        return all(_close(a, b) for a, b in zip(found, expected, strict=True))


def _random(*shape: int, like: Tensor) -> Tensor:
    """Normal numbers of their own, so that the caller's random state stays as it is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(like.dtype)


def _same(module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    try:
        return _close(forward(x), module(x))
    except (RuntimeError, TypeError, ValueError):
        return False


def _close(found: Tensor, expected: Tensor) -> bool:
    """Within rounding of each other, which for bfloat16 is 1/256."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    off, size = (found.double() - expected.double()).norm(), expected.double().norm()
    return bool(off <= (1e-5 if expected.dtype == torch.float32 else 1e-2) * size)
