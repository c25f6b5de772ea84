"""Linear layers of a generation module on a CPU: packed for the processor, and those that share an input run as one.

A bf16 product with a plain weight packs it anew at every call, and several small ones cost more than a large one. Which
layers share an input is seen by watching a forward pass, so no architecture is known by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat.generation.cpu import cpp_kernels
from dschat.generation.cpu.cpp_kernels import CPUKernels


class FusedLinears:
    """Layers that are given the same tensor, as one product; the layers' own `forward` hands out the parts.

    The first layer that meets an input computes all parts; each part is handed out once, so that an input that comes
    again is computed again.

    Attributes:
        packed: the weights, at an address that stays.
    """

    def __init__(self, layers: list[nn.Linear], library: CPUKernels) -> None:
        self.layers, self.library = layers, library
        self.sizes = [layer.out_features for layer in layers]
        self.packed: Tensor | None = None
        self.bias: Tensor | None = None
        self.input: Tensor | None = None
        self.parts: dict[int, Tensor] = {}

    def take(self) -> None:
        """Pack the weights of this moment, and stand in for the layers."""
        weights = [layer.weight for layer in self.layers]
        self.packed = self.library.pack(weights[0] if len(weights) == 1 else torch.cat(weights), self.packed)
        if self.layers[0].bias is not None:
            bias = torch.cat([layer.bias for layer in self.layers])
            self.bias = bias if self.bias is None else self.bias.copy_(bias)
        for place, layer in enumerate(self.layers):
            layer.forward = self._forward_of(place)

    def release(self, *, keep: bool = False) -> None:
        """Give the layers their own forward back; keep: the buffers stay, for the next `take`."""
        self.input, self.parts = None, {}
        if not keep:
            self.packed = self.bias = None
        for layer in self.layers:
            vars(layer).pop("forward", None)

    def _forward_of(self, place: int) -> Callable[[Tensor], Tensor]:
        layer = self.layers[place]
        usual = partial(type(layer).forward, layer)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if len(args) != 1 or kwargs or args[0].dtype != self.packed.dtype or not args[0].numel():
                return usual(*args, **kwargs)
            (x,) = args
            if x is not self.input or place not in self.parts:
                out = self.library.linear(x, self.packed, self.bias, sum(self.sizes))
                if len(self.sizes) == 1:
                    return out
                self.input, self.parts = x, dict(enumerate(out.split(self.sizes, dim=-1)))
            part = self.parts.pop(place)
            if not self.parts:
                self.input = None
            return part

        return forward


def fusable(model: PreTrainedModel) -> CPUKernels | None:
    """The kernels that multiply faster than torch, where there are some: for bf16 weights on a CPU that has it."""
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return None
    library = cpp_kernels.load()
    return library if library is not None and library.multiplies_bf16 else None


@torch.inference_mode()
def shared_inputs(model: PreTrainedModel) -> list[list[nn.Linear]]:
    """The plain linear layers of a model, those that are given the same tensor side by side; a forward is watched."""
    met: list[tuple[nn.Linear, Any]] = []  # inputs are held, so that no address is given twice

    def note(layer: nn.Linear, inputs: tuple[Any, ...]) -> None:
        met.append((layer, inputs[0] if inputs else object()))  # an input given by name is shared with nobody

    layers = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[tuple[int, bool], list[nn.Linear]] = {}
    for layer, given in met:
        groups.setdefault((id(given), layer.bias is None), []).append(layer)
    once = {layer for layer in layers if sum(other is layer for other, _ in met) == 1}  # a layer met twice stays alone
    return [group for group in groups.values() if once.issuperset(group)]
