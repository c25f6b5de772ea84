"""Fused C++ forwards for RMS norms, gated feed-forward layers and rotary embeddings during generation on a CPU.

torch takes five to ten calls for each, whose overhead exceeds the arithmetic at the size of a decoding step. Whether a
kernel can replace a module is tested on random inputs, without a list of architectures; modules that differ are left
unchanged. A trial covers one call signature: any other call runs the module's own code.
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

ROTARY_FUNCTION = "apply_rotary_pos_emb"  # name of the rotary function in transformers' modelling files
TRIAL_ROWS = 3


@torch.inference_mode()
def fused_forwards(model: nn.Module) -> dict[nn.Module, Callable]:
    """Replacement forwards equal to the modules' own up to rounding; empty if there are no kernels."""
    if model.device.type != "cpu" or model.dtype not in cpp_kernels.DTYPES or (library := cpp_kernels.load()) is None:
        return {}
    forwards = {}
    rotations: dict[type, Rotary] = {}  # one per layer class, so that each is tested once
    for module in model.modules():
        forward = _norm_forward(module, library) or _gated_forward(module, library)
        forward = forward or _rotary_forward(module, library, rotations)
        if forward is not None:
            forwards[module] = forward
    return forwards


def _norm_forward(module: nn.Module, library: CPUKernels) -> Callable | None:
    """Forward for an RMS norm that multiplies by weight or by 1 + weight; None for other modules."""
    weight = module._parameters.get("weight")
    if len(module._parameters) != 1 or module._modules or weight is None or weight.dim() != 1:
        return None
    if weight.dtype not in cpp_kernels.DTYPES:
        return None
    original, random = module.forward, _random(TRIAL_ROWS + 1, len(weight), like=weight)
    x = random[1:]
    epsilons = {value for value in vars(module).values() if isinstance(value, float)}
    for eps, shift in product(epsilons, (0.0, 1.0)):

        def kernel(x: Tensor, eps: float = eps, shift: float = shift) -> Tensor:
            return library.rms_norm(x, module.weight, eps=eps, shift=shift)

        with _replaced_weight(module, random[0]):  # weights of zeros or ones would hide the shift
            # With small inputs, eps is as large as the mean square, so a wrong eps is detected.
            same = all(_matches(original, kernel, scale * x) for scale in (1.0, 4 * eps**0.5))
        if same:
            return SingleInputForward(original, kernel, width=len(weight), dtype=weight.dtype)
    return None


def _gated_forward(module: nn.Module, library: CPUKernels) -> Callable | None:
    """Forward for down(act(gate(x)) * up(x)) with SiLU or the tanh form of GELU; None for other modules."""
    linears = [child for child in module.children() if isinstance(child, nn.Linear)]
    if len(linears) != 3 or any(linear.weight.dtype not in cpp_kernels.DTYPES for linear in linears):
        return None
    original = module.forward
    for gate, up, down in permutations(linears):
        same_shape = gate.weight.shape == up.weight.shape == down.weight.shape[::-1]
        if not same_shape:
            continue
        x = 3 * _random(TRIAL_ROWS, gate.in_features, like=gate.weight)
        for gelu in (False, True):

            def kernel(x: Tensor, gate=gate, up=up, down=down, gelu: bool = gelu) -> Tensor:
                return down(library.gated(gate(x), up(x), gelu=gelu))

            if _matches(original, kernel, x):
                return SingleInputForward(original, kernel, width=gate.in_features, dtype=gate.weight.dtype)
    return None


class SingleInputForward:
    """A module's forward: the kernel for calls like the trial's, with one tensor; else the module's own code.

    For example a norm may also get a gate, or an input of another dtype than its weight: the trial covers neither.
    """

    def __init__(
        self, original: Callable, kernel: Callable[[Tensor], Tensor], *, width: int, dtype: torch.dtype
    ) -> None:
        """original, kernel: [..., width] → a tensor; dtype: of the input that the kernel takes."""
        self.original, self.kernel, self.width, self.dtype = original, kernel, width, dtype

    def __call__(self, *args: object, **kwargs: object) -> object:
        if len(args) == 1 and not kwargs:
            (x,) = args
            if isinstance(x, Tensor) and x.dtype == self.dtype and x.shape[-1:] == (self.width,) and x.numel():
                return self.kernel(x)
        return self.original(*args, **kwargs)


def _rotary_forward(module: nn.Module, library: CPUKernels, rotations: dict[type, Rotary]) -> Callable | None:
    """For attention that calls apply_rotary_pos_emb: its forward with that name bound to Rotary; else None."""
    forward = type(module).forward
    code = getattr(forward, "__code__", None)
    if code is None or ROTARY_FUNCTION not in code.co_names or ROTARY_FUNCTION not in forward.__globals__:
        return None
    if type(module) not in rotations:
        rotations[type(module)] = Rotary(forward.__globals__[ROTARY_FUNCTION], library)
    names = {**forward.__globals__, ROTARY_FUNCTION: rotations[type(module)]}
    copied = types.FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return partial(copied, module)


class Rotary:
    """Replaces a model's rotary function: the kernel for kinds of calls that pass a trial; else the function itself.

    Architectures call functions of this name with one tensor or two, real or complex angles, or extra positions: the
    kernel is used only for the four tensors described in `_is_rotary_call`.
    """

    def __init__(self, original: Callable, library: CPUKernels) -> None:
        self.original, self.library = original, library
        self._matches: dict[tuple[int, torch.dtype], bool] = {}  # per (head width, dtype)

    def __call__(self, *args: object, **kwargs: object) -> object:
        if kwargs or not _is_rotary_call(*args):
            return self.original(*args, **kwargs)
        q, k, cos, sin = args
        kind = q.shape[-1], q.dtype
        if kind not in self._matches:
            # Tested on random cos and sin, not the call's own: at position 0 every variant gives the same.
            self._matches[kind] = self._passes_trial(*kind)
        if not self._matches[kind]:
            return self.original(q, k, cos, sin)
        return self.library.rotate(q, cos, sin), self.library.rotate(k, cos, sin)

    def _passes_trial(self, width: int, dtype: torch.dtype) -> bool:
        like = torch.empty(0, dtype=dtype)
        q, k = _random(2, 3, 5, width, like=like), _random(2, 1, 5, width, like=like)
        cos, sin = _random(2, 5, width, like=like), _random(2, 5, width, like=like)
        try:
            expected = self.original(q, k, cos, sin)
        except Exception:  # the model's function may not accept these inputs: any error
            return False
        if not isinstance(expected, tuple | list) or len(expected) != 2:
            return False
        rotated = [self.library.rotate(x, cos, sin) for x in (q, k)]
        return all(_close(a, b) for a, b in zip(rotated, expected, strict=True))


def _is_rotary_call(*args: object) -> bool:
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
    """Normal numbers from a separate generator, so that the global random state is unchanged."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(like.dtype)


@contextmanager
def _replaced_weight(module: nn.Module, values: Tensor) -> Iterator[None]:
    """Replace the module's weight by `values` for the duration of the context."""
    saved = module.weight
    module._parameters["weight"] = nn.Parameter(values, requires_grad=False)
    try:
        yield
    finally:
        module._parameters["weight"] = saved


def _matches(original: Callable, kernel: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    try:
        expected = original(x)
    except Exception:  # the module may not take a single tensor: any error of its own code
        return False
    return isinstance(expected, Tensor) and _close(kernel(x), expected)


def _close(actual: Tensor, expected: Tensor) -> bool:
    """Equal within a relative L2 error of 1e-5 (float32) or 1e-2 (bfloat16); all-zero outputs do not count."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    error, norm = (actual.double() - expected.double()).norm(), expected.double().norm()
    return bool(error <= (1e-5 if expected.dtype == torch.float32 else 1e-2) * norm) and bool(norm > 0)
