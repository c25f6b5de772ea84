"""Per-layer gathering of weights: which modules count as layers, and hooks that gather each one for its forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dschat.models.weights import gathered

_LISTS = (nn.ModuleList, nn.ModuleDict)  # containers, never called


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
        if isinstance(current, _LISTS):
            inside_list = True
        elif inside_list:
            return ".".join(names[: depth + 1])
    return path


@dataclass(frozen=True)
class _Own:
    """A parameter of a layer: its owning module, and its name there."""

    owner: nn.Module
    leaf: str
    parameter: nn.Parameter


@contextmanager
def full_layers(module: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inside, each layer's full weights are gathered for the duration of its forward; for use without gradients.

    Under ZeRO-3 all ranks must run the same forwards.

    Args:
        module: any module, not in a DeepSpeed engine.
        dtype: floating-point weights are cast to it for the forward; None: unchanged.
    """
    layers: dict[nn.Module, list[_Own]] = {}
    for path, part in module.named_modules():
        own = [_Own(part, leaf, p) for leaf, p in part._parameters.items() if p is not None]
        if own:
            layers.setdefault(module.get_submodule(layer_path(module, path)), []).extend(own)
    handles = []
    try:
        for layer, weights in layers.items():
            handles += _lend(layer, weights, dtype)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _lend(layer: nn.Module, weights: list[_Own], dtype: torch.dtype | None) -> list[Any]:
    held = ExitStack()

    def take(*_: Any) -> None:
        held.enter_context(gathered([own.parameter for own in weights]))
        for own in weights:
            full = own.parameter
            if dtype is not None and full.is_floating_point() and full.dtype != dtype:
                own.owner._parameters[own.leaf] = nn.Parameter(full.detach().to(dtype), requires_grad=False)

    def give_back(*_: Any) -> None:
        for own in weights:
            own.owner._parameters[own.leaf] = own.parameter
        held.close()

    return [layer.register_forward_pre_hook(take), layer.register_forward_hook(give_back, always_call=True)]
