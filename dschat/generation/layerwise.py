"""Layerwise weights for generation with models that do not fit: each layer's weights are materialised when it runs.

Under ZeRO-3 all ranks run their forwards in lockstep. A layer is a whole decoder layer (see
dschat.models.layer_weights), since models read weights of submodules without calling them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from dschat.models.layer_weights import layer_path
from dschat.models.weights import WeightSource, full_shape, gathered

TRIAL_TOKENS = 4


class LayerwiseWeights:
    """Materialises the weights of each layer of a module for the duration of its forward.

    Gathering is a collective, so all ranks must run the same number of forwards: before each one, an all-reduce finds
    whether any rank is still generating, and idle ranks run a dummy token. `release` blocks until all ranks are idle.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        sources: list[WeightSource],
        tied_names: dict[str, list[str]],
        *,
        dtype: Callable[[nn.Parameter], torch.dtype],
        convert: Callable[[WeightSource, nn.Parameter], Tensor],
    ) -> None:
        """Install hooks and placeholders.

        Args:
            module: gets hooks, and placeholders of the weights' shapes that use no memory.
            sources: the training modules with the parameters.
            tied_names: for each weight, all (tied) names it has in the module.
            dtype: returns a weight's dtype during generation.
            convert: makes the generation weight from a source whose parameters are gathered.
        """
        self.module = module
        self.device = next(p.device for source in sources for _, p in source.parameters)
        self.partitioned = any(hasattr(parameter, "ds_id") for source in sources for parameter in source.needed)
        self._skip_sync = False
        layers: dict[nn.Module, list[Weight]] = {}
        for source in sources:
            for name, parameter in source.parameters:
                for path, _, leaf in (same.rpartition(".") for same in tied_names.get(name, ())):
                    # NaN, so that a layer that reads a weight outside its forward gives NaN logits.
                    fill = torch.full((), torch.nan) if parameter.is_floating_point() else torch.zeros(())
                    scalar = fill.to(parameter.device, dtype(parameter))
                    placeholder = nn.Parameter(scalar.expand(full_shape(parameter)), requires_grad=False)
                    weight = Weight(module.get_submodule(path), leaf, source, parameter, placeholder)
                    layers.setdefault(module.get_submodule(layer_path(module, path)), []).append(weight)
        self._handles = [module.register_forward_pre_hook(self._before_forward)]
        for layer, weights in layers.items():
            self._handles += _load_during_forward(layer, weights, convert)

    def trial_problem(self) -> str | None:
        """Run a trial forward; returns what failed, or None. All ranks must call this."""
        ids = torch.arange(TRIAL_TOKENS, device=self.device).unsqueeze(0)
        self._skip_sync = True
        try:
            with torch.inference_mode():
                logits = self.module(input_ids=ids, use_cache=False).logits
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # anything the model's own code raises on placeholder weights
            return f"{type(error).__name__}: {error}"
        finally:
            self._skip_sync = False
        return None if logits.isfinite().all() else "its logits are not finite, as they are where a weight is missing"

    def remove_hooks(self) -> None:
        """Remove the hooks without synchronising, for when no rank has generated yet."""
        for handle in self._handles:
            handle.remove()

    def release(self) -> None:
        """Run dummy forwards until no rank is generating, then remove the hooks."""
        try:
            self._skip_sync = True
            while self._any_rank_generates(False):
                with torch.inference_mode():
                    self.module(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False)
        finally:
            self.remove_hooks()

    def _before_forward(self, *_: Any) -> None:
        if not self._skip_sync:
            self._any_rank_generates(True)

    def _any_rank_generates(self, local: bool) -> bool:
        if not self.partitioned:
            return local
        generating = torch.tensor(int(local), device=self.device)
        dist.all_reduce(generating, op=dist.ReduceOp.MAX)
        return bool(generating)


@dataclass(frozen=True)
class Weight:
    """One weight of a layer: the owning module, its training source, and its placeholder between forwards."""

    owner: nn.Module
    leaf: str
    source: WeightSource
    parameter: nn.Parameter
    placeholder: nn.Parameter


def _load_during_forward(
    layer: nn.Module, weights: list[Weight], convert: Callable[[WeightSource, nn.Parameter], Tensor]
) -> list[RemovableHandle]:
    """Hooks that set the weights of a layer before its forward and restore the placeholders after it."""
    gathered_weights = ExitStack()

    def load(*_: Any) -> None:
        # Gathering writes `.data` of training parameters, which must not become inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            gathered_weights.enter_context(gathered([p for source in {id(w.source): w.source for w in weights}.values()
                                         for p in source.needed]))  # fmt: skip
            for weight in weights:
                full = convert(weight.source, weight.parameter)
                weight.owner._parameters[weight.leaf] = nn.Parameter(full, requires_grad=False)

    def unload(*_: Any) -> None:
        for weight in weights:
            weight.owner._parameters[weight.leaf] = weight.placeholder
        with torch.inference_mode(False), torch.no_grad():
            gathered_weights.close()

    for weight in weights:
        weight.owner._parameters[weight.leaf] = weight.placeholder
    return [layer.register_forward_pre_hook(load), layer.register_forward_hook(unload, always_call=True)]
