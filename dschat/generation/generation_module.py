"""Inference copy of the model for rollouts: same architecture, weights aliased or copied from the training module."""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat.generation.layerwise import LayerwiseWeights
from dschat.generation.memory import free_memory
from dschat.models.weights import (
    WeightSource,
    folded_weight,
    full_shape,
    gathered,
    is_partitioned,
    plain_name,
    weight_sources,
)

ALIGNMENT = 64  # each copied weight starts on a cache line; bytes


class GenerationModule:
    """A model without hooks, adapters, dropout or activation checkpointing, on the meta device except while in use.

    `load_weights` aliases the training parameters that are unpartitioned and already in the generation dtype. Weights
    with LoRA adapters, in another dtype, or partitioned by ZeRO-3 are copied into one flat buffer per dtype; if they do
    not fit into free memory, each layer's weights are materialised when it runs. Training weights are never modified.

    Attributes:
        module: the model on the meta device or with weights, of the training model's class and config.
        layerwise: the per-layer weight loader while it is in use (see LayerwiseWeights), else None.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype | None = None,
        pin: bool = False,
        memory_fraction: float = 0.8,
        layerwise: bool | None = None,
    ) -> None:
        """Build the model on the meta device.

        Args:
            model: the training model, with or without LoRA adapters.
            dtype: of the weights during generation; None keeps each parameter's dtype.
            pin: keep the flat buffers, and so the weights' addresses, between calls of `load_weights`.
            memory_fraction: share of the free memory that copied weights may use.
            layerwise: materialise each layer's copies when it runs; None: only if all of them do not fit.
        """
        self.model = model
        self.dtype = dtype
        self.pin, self.memory_fraction, self._layerwise_option = pin, memory_fraction, layerwise
        with torch.device("meta"):
            self.module = type(model)(copy.deepcopy(model.config)).eval()
        self.module.requires_grad_(False)
        self._meta_parameters: dict[str, nn.Parameter] = dict(self.module.named_parameters(remove_duplicate=False))
        self._buffers = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        self._flat: dict[torch.dtype, Tensor] = {}
        self.layerwise: LayerwiseWeights | None = None
        self._layerwise_works = False
        tied = defaultdict(list)
        for name, parameter in self._meta_parameters.items():
            tied[id(parameter)].append(name)
        self._tied_names = {name: names for names in tied.values() for name in names}

    def load_weights(self) -> PreTrainedModel:
        """Load the current training weights. A collective under ZeRO-3: all ranks must call it.

        Returns:
            The module, ready for inference.

        Raises:
            ValueError: the training model's parameter names differ from those of its class and config.
        """
        sources = list(weight_sources(self.model))
        self._check_names(sources)
        copies = {
            name: (full_shape(parameter), self._dtype(parameter))
            for source in sources
            for name, parameter in source.parameters
            if self._is_copied(source, parameter)
        }
        if copies and self._use_layerwise(sources, copies):
            self.layerwise = LayerwiseWeights(
                self.module, sources, self._tied_names, dtype=self._dtype, convert=self._convert
            )
        else:
            views = self._buffer_views(copies)
            for source in sources:
                with gathered([] if copies.keys().isdisjoint(name for name, _ in source.parameters) else source.needed):
                    for name, parameter in source.parameters:
                        weight = parameter.detach()
                        if name in copies:
                            weight = views[name].copy_(self._convert(source, parameter))
                        self._set_parameter(name, weight)
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            # Includes non-persistent buffers (rotary frequencies, causal masks), which a state dict omits.
            if plain_name(name) in self._buffers:
                set_tensor(self.module, plain_name(name), buffer)
        if self.layerwise is not None and not self._check_layerwise():
            return self.load_weights()
        return self.module

    @property
    def holds_copies(self) -> bool:
        """Whether any weight is a copy rather than an alias of a training tensor."""
        return bool(self._flat) or self.layerwise is not None

    def _check_layerwise(self) -> bool:
        """Whether a trial forward works with layerwise weights (cached); if not, all weights will be gathered."""
        if self._layerwise_works:
            return True
        problem = self.layerwise.trial_problem()
        self._layerwise_works = self._true_on_all_ranks(problem is None, self.layerwise.partitioned)
        if not self._layerwise_works:
            warnings.warn(
                f"{type(self.module).__name__} does not run with one layer's weights at a time ({problem}): all are "
                "gathered at once, which takes the memory of the whole model on every device.",
                stacklevel=2,
            )
            self.layerwise.remove_hooks()
            self.layerwise, self._layerwise_option = None, False
        return self._layerwise_works

    def _true_on_all_ranks(self, local: bool, distributed: bool) -> bool:
        """Whether the condition holds on all ranks; no collective if `distributed` is False."""
        device = next(self.model.parameters()).device
        result = torch.tensor(int(local), dtype=torch.int32, device=device)
        if distributed:
            dist.all_reduce(result, op=dist.ReduceOp.MIN)
        return bool(result)

    def release(self) -> None:
        """Free all weights: every parameter returns to the meta device. Layerwise under ZeRO-3, ranks synchronise."""
        try:
            if self.layerwise is not None:
                self.layerwise.release()
        finally:
            self.layerwise = None
            for name, parameter in self._meta_parameters.items():
                set_tensor(self.module, name, parameter)
            if not self.pin:
                self._flat = {}

    def _check_names(self, sources: list[WeightSource]) -> None:
        present = {name for source in sources for name, _ in source.parameters}
        present |= {other for name in present & self._tied_names.keys() for other in self._tied_names[name]}
        if present != self._meta_parameters.keys():
            differing = sorted(present ^ self._meta_parameters.keys())
            raise ValueError(
                f"the weights of {type(self.model).__name__} and of its config differ in {len(differing)} names, "
                f"{', '.join(differing[:4])} …: modules were added or removed after loading; "
                "fold them into the model before training, or change the config with them."
            )

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self.dtype if self.dtype is not None and parameter.is_floating_point() else parameter.dtype

    def _is_copied(self, source: WeightSource, parameter: nn.Parameter) -> bool:
        # A ZeRO-3 parameter may be gathered now, but it will be partitioned again.
        return hasattr(parameter, "ds_id") or source.folds(parameter) or parameter.dtype != self._dtype(parameter)

    def _convert(self, source: WeightSource, parameter: nn.Parameter) -> Tensor:
        """The weight with LoRA folded in, in the generation dtype; the source's parameters must be gathered."""
        weight = folded_weight(source.layer) if source.folds(parameter) else parameter.detach()
        return weight.to(self._dtype(parameter))

    def _use_layerwise(self, sources: list[WeightSource], copies: dict[str, tuple[torch.Size, torch.dtype]]) -> bool:
        """Whether to copy weights layer by layer; the same on all ranks under ZeRO-3."""
        if self._layerwise_option is not None or self._flat:
            return bool(self._layerwise_option)
        device = next(self.model.parameters()).device
        needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in copies.values())
        partitioned = any(is_partitioned(parameter) for source in sources for parameter in source.needed)
        return not self._true_on_all_ranks(needed <= self.memory_fraction * free_memory(device), partitioned)

    def _buffer_views(self, copies: dict[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
        """A view into the flat buffer of its dtype for each copy; the offsets are the same on every call."""
        device = next(self.model.parameters()).device
        sizes: dict[torch.dtype, int] = defaultdict(int)
        starts = {}
        for name, (shape, dtype) in copies.items():
            starts[name] = sizes[dtype]
            step = max(1, ALIGNMENT // dtype.itemsize)
            sizes[dtype] += -(-math.prod(shape) // step) * step
        for dtype, size in sizes.items():
            if dtype not in self._flat or len(self._flat[dtype]) != size or self._flat[dtype].device != device:
                self._flat.pop(dtype, None)
                self._flat[dtype] = torch.empty(size, dtype=dtype, device=device)
        return {
            name: self._flat[dtype][starts[name] : starts[name] + math.prod(shape)].view(shape)
            for name, (shape, dtype) in copies.items()
        }

    def _set_parameter(self, name: str, weight: Tensor) -> None:
        """Set a parameter under all its (tied) names."""
        parameter = nn.Parameter(weight, requires_grad=False)
        for same in self._tied_names[name]:
            set_tensor(self.module, same, parameter)


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Set a parameter or buffer by its dotted name without copying it."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    registry = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
    registry[leaf] = tensor
