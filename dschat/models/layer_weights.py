"""Per-layer gathering of weights: which modules count as layers, and hooks that gather each one for its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from dschat.models.weights import gathered, is_partitioned

Result = TypeVar("Result")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # containers, never called


def layer_path(module: nn.Module, path: str) -> str:
    """The path of the module whose forward needs the weights at `path`.

    That is the decoder layer, the first module below an outermost ModuleList; outside of lists the module itself.
    Smaller units do not work: layers read weights of submodules without calling them (Mamba's convolution), and which
    experts a layer calls depends on the tokens, so ranks would gather different modules.
    """
    current, inside_list = module, False
    names = path.split(".") if path else []
    for depth, name in enumerate(names):
        current = getattr(current, name)
        if isinstance(current, _CONTAINERS):
            inside_list = True
        elif inside_list:
            return ".".join(names[: depth + 1])
    return path


@dataclass(frozen=True)
class _OwnedParameter:
    """A parameter of a layer: its owning module, and its name there."""

    owner: nn.Module
    leaf: str
    parameter: nn.Parameter


@contextmanager
def full_layers(module: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Gather each layer's full weights for the duration of its forward; for use without gradients.

    Under ZeRO-3 all ranks must run the same forwards.

    Args:
        module: any module, not in a DeepSpeed engine.
        dtype: floating-point weights are cast to it for the forward; None: unchanged.
    """
    layers: dict[nn.Module, list[_OwnedParameter]] = {}
    for path, part in module.named_modules():
        owned = [_OwnedParameter(part, leaf, p) for leaf, p in part._parameters.items() if p is not None]
        if owned:
            layers.setdefault(module.get_submodule(layer_path(module, path)), []).extend(owned)
    handles = []
    try:
        for layer, weights in layers.items():
            handles += _gather_during_forward(layer, weights, dtype)
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_with_full_weights(module: nn.Module, dtype: torch.dtype, run: Callable[[torch.dtype], Result]) -> Result:
    """run(precision), with full weights in float32, gathered one layer at a time.

    A module that cannot run this way, since it reads a weight outside its layer's forward, is gathered as a whole and
    runs in its own precision. A collective under ZeRO-3.

    Args:
        dtype: of the module's parameters.
    """
    if dtype != torch.float32 or any(is_partitioned(parameter) for parameter in module.parameters()):
        try:
            with full_layers(module, dtype=torch.float32):
                return run(torch.float32)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # any error of the model's own code
            pass
    with gathered(list(module.parameters())):
        return run(dtype)


def _gather_during_forward(layer: nn.Module, weights: list[_OwnedParameter], dtype: torch.dtype | None) -> list[Any]:
    stack = ExitStack()

    def gather(*_: Any) -> None:
        stack.enter_context(gathered([weight.parameter for weight in weights]))
        for weight in weights:
            full = weight.parameter
            if dtype is not None and full.is_floating_point() and full.dtype != dtype:
                weight.owner._parameters[weight.leaf] = nn.Parameter(full.detach().to(dtype), requires_grad=False)

    def restore(*_: Any) -> None:
        for weight in weights:
            weight.owner._parameters[weight.leaf] = weight.parameter
        stack.close()

    return [layer.register_forward_pre_hook(gather), layer.register_forward_hook(restore, always_call=True)]
