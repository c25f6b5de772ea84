"""C++ forwards for RMS norms, gated feed-forward layers and rotary embeddings on a CPU, in training and generation.

torch takes five to ten calls for each, and reads and writes its tensors in every one. Whether a kernel can replace a
module is tested on random inputs, without a list of architectures; modules that differ are left unchanged. A trial
covers one call signature: any other call runs the module's own code.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product

import torch
from torch import Tensor, nn

from dschat.models.cpu import layer_kernels
from dschat.models.cpu.layer_kernels import LayerKernels
from dschat.models.cpu.library import DTYPES
from dschat.models.weights import full_shape, gathered

ROTARY_FUNCTION = "apply_rotary_pos_emb"  # name of the rotary function in transformers' modelling files
TRIAL_ROWS = 3

Forward = Callable[..., object]


@torch.no_grad()
def fused_forwards(model: nn.Module) -> dict[nn.Module, Forward]:
    """Replacement forwards equal to the modules' own up to rounding, in the order of its modules.

    They take a module's parameters and submodules when they are called, so that weights may change and adapters be
    added. A collective under ZeRO-3. Empty if there are no kernels.
    """
    if model.device.type != "cpu" or model.dtype not in DTYPES or (kernels := layer_kernels.load()) is None:
        return {}
    forwards: dict[nn.Module, Forward] = {}
    trials = _Trials(kernels)
    for module in model.modules():
        forward = trials.forward(module)
        if forward is not None:
            forwards[module] = forward
    return forwards


@contextmanager
def replaced_forwards(forwards: dict[nn.Module, Forward]) -> Iterator[None]:
    """Run these modules by other forwards inside."""
    kept = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, forward in kept.items():
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward


@dataclass(frozen=True)
class _Norm:
    """What a norm computes: x / rms(x) · (weight + shift)."""

    eps: float
    shift: float

    def run(self, module: nn.Module, kernels: LayerKernels, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, module.weight, eps=self.eps, shift=self.shift)


@dataclass(frozen=True)
class _GatedLayer:
    """What a gated layer computes: down(act(gate(x)) · up(x)), by the names of its three linear layers."""

    gate: str
    up: str
    down: str
    gelu: bool

    def run(self, module: nn.Module, kernels: LayerKernels, x: Tensor) -> Tensor:
        gate, up, down = (getattr(module, name) for name in (self.gate, self.up, self.down))
        return down(kernels.gated(gate(x), up(x), gelu=self.gelu))


class _Trials:
    """Finds the kernel of each module, with one trial for all modules of a kind."""

    def __init__(self, kernels: LayerKernels) -> None:
        self._kernels = kernels
        self._found: dict[object, _Norm | _GatedLayer | None] = {}
        self._rotations: dict[type, Rotary] = {}  # one per layer class

    def forward(self, module: nn.Module) -> Forward | None:
        if _is_norm(module):
            width, dtype = full_shape(module.weight)[0], module.weight.dtype
            trial: Callable = _find_norm
        elif linears := _three_linears(module):
            width, dtype = _input_width(linears), next(iter(linears.values())).weight.dtype
            trial = _find_gated_layer
        else:
            return _rotary_forward(module, self._kernels, self._rotations)
        settings = frozenset(item for item in vars(module).items() if isinstance(item[1], float | int | str))
        kind = type(module), str(module), settings, width, dtype
        if kind not in self._found:
            with gathered(list(module.parameters())):
                self._found[kind] = trial(module, self._kernels)
        found = self._found[kind]
        if found is None:
            return None
        return SingleInputForward(module.forward, partial(found.run, module, self._kernels), width=width, dtype=dtype)


def _is_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    has_weight_only = len(module._parameters) == 1 and not module._modules and weight is not None
    return has_weight_only and len(full_shape(weight)) == 1 and weight.dtype in DTYPES


def _find_norm(module: nn.Module, kernels: LayerKernels) -> _Norm | None:
    """For an RMS norm that multiplies by weight or by 1 + weight; None for other modules."""
    random = _random(TRIAL_ROWS + 1, len(module.weight), like=module.weight)
    epsilons = {value for value in vars(module).values() if isinstance(value, float)}
    for eps, shift in product(epsilons, (0.0, 1.0)):
        norm = _Norm(eps, shift)
        with _replaced_weight(module, random[0]):  # weights of zeros or ones would hide the shift
            # With small inputs, eps is as large as the mean square, so a wrong eps is detected.
            inputs = [scale * random[1:] for scale in (1.0, 4 * eps**0.5)]
            if all(_matches(module, partial(norm.run, module, kernels), x) for x in inputs):
                return norm
    return None


def _three_linears(module: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a module that has three children of this kind; else empty."""
    linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    return linears if len(linears) == 3 and all(x.weight.dtype in DTYPES for x in linears.values()) else {}


def _input_width(linears: dict[str, nn.Linear]) -> int:
    """Of the two layers of equal shape, gate and up."""
    shapes = [(linear.in_features, linear.out_features) for linear in linears.values()]
    return max(shapes, key=shapes.count)[0]


def _find_gated_layer(module: nn.Module, kernels: LayerKernels) -> _GatedLayer | None:
    """For down(act(gate(x)) · up(x)) with SiLU or the tanh form of GELU; None for other modules."""
    linears = _three_linears(module)
    for (gate, first), (up, second), (down, third) in permutations(linears.items()):
        if not first.weight.shape == second.weight.shape == third.weight.shape[::-1]:
            continue
        x = 3 * _random(TRIAL_ROWS, first.in_features, like=first.weight)
        for gelu in (False, True):
            layer = _GatedLayer(gate, up, down, gelu)
            if _matches(module, partial(layer.run, module, kernels), x):
                return layer
    return None


class SingleInputForward:
    """A module's forward: the kernel for calls like the trial's, with one tensor; else the module's own code.

    For example a norm may also get a gate, or an input of another dtype than its weight: the trial covers neither.
    """

    def __init__(
        self, original: Forward, kernel: Callable[[Tensor], Tensor], *, width: int, dtype: torch.dtype
    ) -> None:
        """kernel: [..., width] → a tensor; dtype: of the input that the kernel takes."""
        self.original, self.kernel, self.width, self.dtype = original, kernel, width, dtype

    def __call__(self, *args: object, **kwargs: object) -> object:
        if len(args) == 1 and not kwargs:
            (x,) = args
            if isinstance(x, Tensor) and x.dtype == self.dtype and x.shape[-1:] == (self.width,) and x.numel():
                return self.kernel(x)
        return self.original(*args, **kwargs)


def _rotary_forward(module: nn.Module, kernels: LayerKernels, rotations: dict[type, Rotary]) -> Forward | None:
    """For attention that calls apply_rotary_pos_emb: its forward with that name bound to Rotary; else None."""
    forward = type(module).forward
    code = getattr(forward, "__code__", None)
    if code is None or ROTARY_FUNCTION not in code.co_names or ROTARY_FUNCTION not in forward.__globals__:
        return None
    if type(module) not in rotations:
        rotations[type(module)] = Rotary(forward.__globals__[ROTARY_FUNCTION], kernels)
    names = {**forward.__globals__, ROTARY_FUNCTION: rotations[type(module)]}
    copied = types.FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return partial(copied, module)


class Rotary:
    """Replaces a model's rotary function: the kernel for kinds of calls that pass a trial; else the function itself.

    Architectures call functions of this name with one tensor or two, real or complex angles, or extra positions: the
    kernel is used only for the four tensors described in `_is_rotary_call`.
    """

    def __init__(self, original: Callable, kernels: LayerKernels) -> None:
        self.original, self.kernels = original, kernels
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
        return self.kernels.rotate(q, cos, sin), self.kernels.rotate(k, cos, sin)

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
        rotated = [self.kernels.rotate(x, cos, sin) for x in (q, k)]
        return all(_close(a, b) for a, b in zip(rotated, expected, strict=True))


def _is_rotary_call(*args: object) -> bool:
    """Whether these are q, k [R, H, T, D] and cos, sin [R or 1, T, D] in one dtype."""
    if len(args) != 4 or not all(isinstance(x, Tensor) and x.dtype == args[0].dtype for x in args):
        return False
    q, k, cos, sin = args
    if not q.dim() == k.dim() == cos.dim() + 1 == 4 or q.dtype not in DTYPES or q.shape[-1] % 2:
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


def _matches(module: nn.Module, kernel: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    try:
        expected = module.forward(x)
    except Exception:  # the module may not take a single tensor: any error of its own code
        return False
    return isinstance(expected, Tensor) and _close(kernel(x), expected)


def _close(actual: Tensor, expected: Tensor) -> bool:
    """Equal within a relative L2 error of 1e-5 (float32) or 1e-2 (bfloat16); all-zero outputs do not count."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    error, norm = (actual.double() - expected.double()).norm(), expected.double().norm()
    return bool(error <= (1e-5 if expected.dtype == torch.float32 else 1e-2) * norm) and bool(norm > 0)
