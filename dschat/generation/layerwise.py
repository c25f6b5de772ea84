"""Weights that do not fit all at once: each layer's are made when it runs, and under ZeRO-3 all ranks run in step.

A layer is a decoder layer with all its parts (see dschat.models.layer_weights), since models read weights of parts that
they do not call.
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
    """Lends every layer of a module its weights for the length of its forward.

    Gathering is a collective, so every rank has to run as many forwards as the others: before each forward ranks say
    whether they have one, and a rank that has none runs a token that nobody wants. `release` waits for the last rank.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        sources: list[WeightSource],
        same_names: dict[str, list[str]],
        *,
        dtype: Callable[[nn.Parameter], torch.dtype],
        convert: Callable[[WeightSource, nn.Parameter], Tensor],
    ) -> None:
        """Take hold of a module.

        Args:
            module: gets placeholders of the weights' shapes, which take no memory, and hooks.
            sources: where the weights come from.
            same_names: of each weight: all names under which the module has it.
            dtype: the weight's dtype while generating.
            convert: makes a weight out of its source, whose parameters are gathered.
        """
        self.module = module
        self.device = next(p.device for source in sources for _, p in source.parameters)
        self.partitioned = any(hasattr(parameter, "ds_id") for source in sources for parameter in source.needed)
        self._following = False
        lent: dict[nn.Module, list[Weight]] = {}
        for source in sources:
            for name, parameter in source.parameters:
                for path, _, leaf in (same.rpartition(".") for same in same_names.get(name, ())):
                    # Not a number: a layer that reads a weight outside its forward must not go unnoticed.
                    blank = torch.full((), torch.nan) if parameter.is_floating_point() else torch.zeros(())
                    empty = blank.to(parameter.device, dtype(parameter))
                    placeholder = nn.Parameter(empty.expand(full_shape(parameter)), requires_grad=False)
                    weight = Weight(module.get_submodule(path), leaf, source, parameter, placeholder)
                    lent.setdefault(module.get_submodule(layer_path(module, path)), []).append(weight)
        self._handles = [module.register_forward_pre_hook(self._before_forward)]
        for layer, weights in lent.items():
            self._handles += _lend(layer, weights, convert)

    def problem(self) -> str | None:
        """What goes wrong when a few tokens run, or None; every rank has to ask."""
        ids = torch.arange(TRIAL_TOKENS, device=self.device).unsqueeze(0)
        self._following = True
        try:
            with torch.inference_mode():
                logits = self.module(input_ids=ids, use_cache=False).logits
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the model's own code, given weights that are not there
            return f"{type(error).__name__}: {error}"
        finally:
            self._following = False
        return None if logits.isfinite().all() else "its logits are not finite, as they are where a weight is missing"

    def abandon(self) -> None:
        """Take the hooks away, where no rank has run anything yet."""
        for handle in self._handles:
            handle.remove()

    def release(self) -> None:
        """Wait until no rank runs forwards any more, then take the hooks away."""
        try:
            self._following = True
            while self._someone_works(False):
                with torch.inference_mode():
                    self.module(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False)
        finally:
            self.abandon()

    def _before_forward(self, *_: Any) -> None:
        if not self._following:
            self._someone_works(True)

    def _someone_works(self, here: bool) -> bool:
        if not self.partitioned:
            return here
        working = torch.tensor(int(here), device=self.device)
        dist.all_reduce(working, op=dist.ReduceOp.MAX)
        return bool(working)


@dataclass(frozen=True)
class Weight:
    """One weight of a layer: the module that has it, where it comes from, and what stands for it meanwhile."""

    owner: nn.Module
    leaf: str
    source: WeightSource
    parameter: nn.Parameter
    placeholder: nn.Parameter


def _lend(
    layer: nn.Module, weights: list[Weight], convert: Callable[[WeightSource, nn.Parameter], Tensor]
) -> list[RemovableHandle]:
    """Hooks that put the weights into a layer before its forward and take them away behind it."""
    held = ExitStack()

    def take(*_: Any) -> None:
        # Gathering writes `.data` of training parameters, which must not become inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            held.enter_context(gathered([p for source in {id(w.source): w.source for w in weights}.values()
                                         for p in source.needed]))  # fmt: skip
            for weight in weights:
                full = convert(weight.source, weight.parameter)
                weight.owner._parameters[weight.leaf] = nn.Parameter(full, requires_grad=False)

    def give_back(*_: Any) -> None:
        for weight in weights:
            weight.owner._parameters[weight.leaf] = weight.placeholder
        with torch.inference_mode(False), torch.no_grad():
            held.close()

    for weight in weights:
        weight.owner._parameters[weight.leaf] = weight.placeholder
    return [layer.register_forward_pre_hook(take), layer.register_forward_hook(give_back, always_call=True)]
