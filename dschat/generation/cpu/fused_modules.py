"""Norms, gated feed-forward layers and rotary embeddings of a generation module on a CPU, each by one C++ kernel.

torch takes five to ten calls for each, and at the size of a decoding step the calls cost more than the arithmetic. What
a kernel can stand for is found by trying both on random numbers, so no architecture is known by name, and whatever
differs stays as it is. A trial covers calls of one kind: in use, any other call runs the module's own code.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import permutations, product

import torch
from torch import Tensor, nn

from dschat.generation.cpu import cpp_kernels
from dschat.generation.cpu.cpp_kernels import CPUKernels

ROTARY = "apply_rotary_pos_emb"  # what transformers' models call the function that rotates queries and keys
TRIAL_ROWS = 3


@torch.inference_mode()
def faster_forwards(model: nn.Module) -> dict[nn.Module, Callable]:
    """Forwards that give what the modules' own give, up to rounding; empty where there are no kernels."""
    if model.device.type != "cpu" or model.dtype not in cpp_kernels.DTYPES or (library := cpp_kernels.load()) is None:
        return {}
    found = {}
    rotations: dict[type, Rotary] = {}  # one for all layers of a class, so that it is tried once
    for module in model.modules():
        forward = _norm(module, library) or _gated(module, library) or _rotating(module, library, rotations)
        if forward is not None:
            found[module] = forward
    return found


def _norm(module: nn.Module, library: CPUKernels) -> Callable | None:
    """For a root-mean-square norm, its weight taken as it is or plus one."""
    weight = module._parameters.get("weight")
    if len(module._parameters) != 1 or module._modules or weight is None or weight.dim() != 1:
        return None
    if weight.dtype not in cpp_kernels.DTYPES:
        return None
    plain, random = module.forward, _random(TRIAL_ROWS + 1, len(weight), like=weight)
    x = random[1:]
    epsilons = {value for value in vars(module).values() if isinstance(value, float)}
    for eps, shift in product(epsilons, (0.0, 1.0)):

        def kernel(x: Tensor, eps: float = eps, shift: float = shift) -> Tensor:
            return library.rms_norm(x, module.weight, eps=eps, shift=shift)

        with _weight(module, random[0]):  # weights of zeros or ones would hide the shift
            # With small numbers eps counts as much as they do.
            same = all(_same(plain, kernel, scale * x) for scale in (1.0, 4 * eps**0.5))
        if same:
            return OneInput(plain, kernel, width=len(weight), dtype=weight.dtype)
    return None


def _gated(module: nn.Module, library: CPUKernels) -> Callable | None:
    """For down(act(gate(x)) * up(x)) with SiLU or GELU's tanh form."""
    linears = [child for child in module.children() if isinstance(child, nn.Linear)]
    if len(linears) != 3 or any(linear.weight.dtype not in cpp_kernels.DTYPES for linear in linears):
        return None
    plain = module.forward
    for gate, up, down in permutations(linears):
        same_shape = gate.weight.shape == up.weight.shape == down.weight.shape[::-1]
        if not same_shape:
            continue
        x = 3 * _random(TRIAL_ROWS, gate.in_features, like=gate.weight)
        for gelu in (False, True):

            def kernel(x: Tensor, gate=gate, up=up, down=down, gelu: bool = gelu) -> Tensor:
                return down(library.gated(gate(x), up(x), gelu=gelu))

            if _same(plain, kernel, x):
                return OneInput(plain, kernel, width=gate.in_features, dtype=gate.weight.dtype)
    return None


class OneInput:
    """A module's forward: a kernel for calls like those of the trial, with one tensor; else the module's own code.

    A norm may be given a gate as well, or residuals in another dtype than its weight: the trial covers neither.
    """

    def __init__(self, plain: Callable, kernel: Callable[[Tensor], Tensor], *, width: int, dtype: torch.dtype) -> None:
        """plain, kernel: [..., width] → a tensor; dtype: of the input that the kernel takes."""
        self.plain, self.kernel, self.width, self.dtype = plain, kernel, width, dtype

    def __call__(self, *args: object, **kwargs: object) -> object:
        if len(args) == 1 and not kwargs:
            (x,) = args
            if isinstance(x, Tensor) and x.dtype == self.dtype and x.shape[-1:] == (self.width,) and x.numel():
                return self.kernel(x)
        return self.plain(*args, **kwargs)


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
    """Stands for a model's function: a kernel for calls on whose kind a trial shows the same; else the function.

    Architectures call functions of this name with one tensor or two, angles as tensors or complex numbers, positions
    beside them: only four tensors of the shapes below are given to the kernel.
    """

    def __init__(self, plain: Callable, library: CPUKernels) -> None:
        self.plain, self.library = plain, library
        self._same: dict[tuple[int, torch.dtype], bool] = {}  # of each head width and dtype

    def __call__(self, *args: object, **kwargs: object) -> object:
        if kwargs or not _rotates(*args):
            return self.plain(*args, **kwargs)
        q, k, cos, sin = args
        kind = q.shape[-1], q.dtype
        if kind not in self._same:
            # Real angles would not do: at position 0 every form is the same.
            self._same[kind] = self._agrees(*kind)
        if not self._same[kind]:
            return self.plain(q, k, cos, sin)
        return self.library.rotate(q, cos, sin), self.library.rotate(k, cos, sin)

    def _agrees(self, width: int, dtype: torch.dtype) -> bool:
        like = torch.empty(0, dtype=dtype)
        q, k = _random(2, 3, 5, width, like=like), _random(2, 1, 5, width, like=like)
        cos, sin = _random(2, 5, width, like=like), _random(2, 5, width, like=like)
        try:
            expected = self.plain(q, k, cos, sin)
        except Exception:  # foreign code given what it may not expect: any error of its own
            return False
        if not isinstance(expected, tuple | list) or len(expected) != 2:
            return False
        found = [self.library.rotate(x, cos, sin) for x in (q, k)]
        return all(_close(a, b) for a, b in zip(found, expected, strict=True))


def _rotates(*args: object) -> bool:
    """Whether these are q, k [R, H, T, D] and cos, sin [R or 1, T, D] in one dtype."""
    if len(args) != 4 or not all(isinstance(x, Tensor) and x.dtype == args[0].dtype for x in args):
        return False
    q, k, cos, sin = args
    if not q.dim() == k.dim() == cos.dim() + 1 == 4 or q.dtype not in cpp_kernels.DTYPES or q.shape[-1] % 2:
        return False
    rows, _, tokens, width = q.shape
    shapes_fit = (k.shape[0], *k.shape[2:]) == (rows, tokens, width) and cos.shape == sin.shape
    return shapes_fit and cos.shape in ((rows, tokens, width), (1, tokens, width))


def _random(*shape: int, like: Tensor) -> Tensor:
    """Normal numbers of their own, so that the caller's random state stays as it is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(like.dtype)


@contextmanager
def _weight(module: nn.Module, values: Tensor) -> Iterator[None]:
    """Inside, the module has another weight."""
    own = module.weight
    module._parameters["weight"] = nn.Parameter(values, requires_grad=False)
    try:
        yield
    finally:
        module._parameters["weight"] = own


def _same(plain: Callable, kernel: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    try:
        expected = plain(x)
    except Exception:  # a module that takes something else than one tensor: any error of its own code
        return False
    return isinstance(expected, Tensor) and _close(kernel(x), expected)


def _close(found: Tensor, expected: Tensor) -> bool:
    """Within rounding of each other, which for bfloat16 is 1/256; zeros prove nothing."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    off, size = (found.double() - expected.double()).norm(), expected.double().norm()
    return bool(off <= (1e-5 if expected.dtype == torch.float32 else 1e-2) * size) and bool(size > 0)
