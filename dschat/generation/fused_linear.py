"""Linear layers of a generation module on a CPU: packed for the processor, and those that share an input run as one.

A bf16 product with a plain weight packs it anew at every call, and a small one is not worth a second thread. Which
layers share an input is seen by watching a forward pass, so no architecture is known by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Rows that the packed layout is made for; others work too.
USUAL_ROWS = 64


class FusedLinears:
    """Layers that are given the same tensor, as one product; the layers' own `forward` hands out the parts.

    The first layer that meets an input computes all parts; each part is handed out once, so that an input that comes
    again is computed again.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        weight = torch.cat([layer.weight for layer in layers])  # [sum of sizes, in]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, USUAL_ROWS)
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        self.input: Tensor | None = None
        self.parts: dict[int, Tensor] = {}
        for place, layer in enumerate(layers):
            layer.forward = self._forward_of(place)

    def _forward_of(self, place: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if x is not self.input or place not in self.parts:
                out = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
                if len(self.sizes) == 1:
                    return out
                self.input, self.parts = x, dict(enumerate(out.split(self.sizes, dim=-1)))
            part = self.parts.pop(place)
            if not self.parts:
                self.input = None
            return part

        return forward

    def release(self) -> None:
        """Give the layers their own forward back."""
        for layer in self.layers:
            del layer.forward


def fusable(model: PreTrainedModel) -> bool:
    """Whether fusing brings anything here, and torch has what it takes: bf16 weights on a CPU."""
    weight = model.get_input_embeddings().weight
    operations = ("_reorder_linear_weight", "_linear_pointwise")
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and all(hasattr(torch.ops.mkldnn, name) for name in operations)
    )


@torch.inference_mode()
def shared_inputs(model: PreTrainedModel) -> list[list[nn.Linear]]:
    """The plain linear layers of a model, those that are given the same tensor side by side; a forward is watched."""
    met: list[tuple[nn.Linear, Any]] = []  # inputs are held, so that no address is given twice

    def note(layer: nn.Linear, inputs: tuple[Any, ...]) -> None:
        met.append((layer, inputs[0]))

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
