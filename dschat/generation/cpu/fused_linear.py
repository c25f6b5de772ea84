"""Packed bf16 linear layers for generation on a CPU; layers that share an input are fused into one product.

torch repacks a plain bf16 weight at every call, and several small products cost more than one large one. A traced
forward pass shows which layers share an input, so that no list of architectures is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat.generation.cpu import cpp_kernels
from dschat.generation.cpu.cpp_kernels import DecodingKernels


class FusedLinears:
    """Linear layers with the same input, computed as one product; each layer's `forward` returns its part.

    The first layer called with an input computes all parts; each part is returned once, so that a repeated input
    is computed again.

    Attributes:
        packed: the packed weights, at a fixed address.
    """

    def __init__(self, layers: list[nn.Linear], library: DecodingKernels) -> None:
        self.layers, self.library = layers, library
        self.sizes = [layer.out_features for layer in layers]
        self.packed: Tensor | None = None
        self.bias: Tensor | None = None
        self.input: Tensor | None = None
        self.parts: dict[int, Tensor] = {}

    def pack_weights(self) -> None:
        """Pack the current weights and replace the layers' forwards."""
        weights = [layer.weight for layer in self.layers]
        self.packed = self.library.pack(weights[0] if len(weights) == 1 else torch.cat(weights), self.packed)
        if self.layers[0].bias is not None:
            bias = torch.cat([layer.bias for layer in self.layers])
            self.bias = bias if self.bias is None else self.bias.copy_(bias)
        for index, layer in enumerate(self.layers):
            layer.forward = self._forward_of(index)

    def release(self, *, keep: bool = False) -> None:
        """Restore the layers' own forwards; keep: keep the buffers for the next `pack_weights`."""
        self.input, self.parts = None, {}
        if not keep:
            self.packed = self.bias = None
        for layer in self.layers:
            vars(layer).pop("forward", None)

    def _forward_of(self, index: int) -> Callable[[Tensor], Tensor]:
        layer = self.layers[index]
        original = partial(type(layer).forward, layer)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if len(args) != 1 or kwargs or args[0].dtype != self.packed.dtype or not args[0].numel():
                return original(*args, **kwargs)
            (x,) = args
            if x is not self.input or index not in self.parts:
                out = self.library.linear(x, self.packed, self.bias, sum(self.sizes))
                if len(self.sizes) == 1:
                    return out
                self.input, self.parts = x, dict(enumerate(out.split(self.sizes, dim=-1)))
            part = self.parts.pop(index)
            if not self.parts:
                self.input = None
            return part

        return forward


def bf16_kernels(model: PreTrainedModel) -> DecodingKernels | None:
    """The kernels if the model has bf16 weights on a CPU with bf16 instructions, else None."""
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return None
    library = cpp_kernels.load()
    return library if library is not None and library.multiplies_bf16 else None


@torch.inference_mode()
def layers_by_input(model: PreTrainedModel) -> list[list[nn.Linear]]:
    """The nn.Linear layers of a model, grouped by the input tensor they receive in a traced forward."""
    calls: list[tuple[nn.Linear, Any]] = []  # inputs are kept alive, so that ids are unique

    def record_input(layer: nn.Linear, inputs: tuple[Any, ...]) -> None:
        calls.append((layer, inputs[0] if inputs else object()))  # keyword inputs are not grouped

    layers = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [layer.register_forward_pre_hook(record_input) for layer in layers]
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[tuple[int, bool], list[nn.Linear]] = {}
    for layer, x in calls:
        groups.setdefault((id(x), layer.bias is None), []).append(layer)
    called_once = {layer for layer in layers if sum(other is layer for other, _ in calls) == 1}
    return [group for group in groups.values() if called_once.issuperset(group)]
