"""A second module of the same architecture for decoding, which borrows its weights from the training module."""

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

ALIGNMENT = 64  # bytes between the starts of two copies: a cache line


class GenerationModule:
    """A model without hooks, adapters, dropout or checkpointing, empty (on the meta device) except while in use.

    Filling it aliases the live parameters wherever they are whole and in the right dtype. Weights that adapters change,
    weights in another dtype, and those of ZeRO-3 (which exist in pieces) are copied into one flat buffer a dtype; where
    that does not fit into the free memory, each layer's are made when it runs. Training weights are only read.

    Attributes:
        module: the empty or filled model, of the training model's class and config.
        layerwise: after fill: whether each layer's weights come when it runs.
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
        """Build the skeleton.

        Args:
            model: the training model, adapters inside or not.
            dtype: of the weights while generating; None keeps each one's own.
            pin: keep the buffers of copies, and with them the weights' addresses, from one filling to the next.
            memory_fraction: of the free memory, what copies may take.
            layerwise: make each layer's copies when it runs; None: where they do not fit.
        """
        self.model = model
        self.dtype = dtype
        self.pin, self.memory_fraction, self._wants_layerwise = pin, memory_fraction, layerwise
        with torch.device("meta"):
            self.module = type(model)(copy.deepcopy(model.config)).eval()
        self.module.requires_grad_(False)
        self._meta: dict[str, nn.Parameter] = dict(self.module.named_parameters(remove_duplicate=False))
        self._buffers = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        self._flat: dict[torch.dtype, Tensor] = {}
        self.layerwise: LayerwiseWeights | None = None
        self._layers_suffice = False
        tied = defaultdict(list)
        for name, parameter in self._meta.items():
            tied[id(parameter)].append(name)
        self._same = {name: names for names in tied.values() for name in names}

    def fill(self) -> PreTrainedModel:
        """Take the weights of this moment. Under ZeRO-3 a collective: every rank has to call it.

        Returns:
            The module, ready to run.

        Raises:
            ValueError: the training model's weights are not those of its class and config.
        """
        sources = list(weight_sources(self.model))
        self._check_names(sources)
        copies = {
            name: (full_shape(parameter), self._dtype(parameter))
            for source in sources
            for name, parameter in source.parameters
            if self._is_copied(source, parameter)
        }
        if copies and self._copy_layerwise(sources, copies):
            self.layerwise = LayerwiseWeights(
                self.module, sources, self._same, dtype=self._dtype, convert=self._converted
            )
        else:
            rooms = self._rooms(copies)
            for source in sources:
                with gathered([] if copies.keys().isdisjoint(name for name, _ in source.parameters) else source.needed):
                    for name, parameter in source.parameters:
                        weight = parameter.detach()
                        if name in copies:
                            weight = rooms[name].copy_(self._converted(source, parameter))
                        self._put(name, weight)
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            # Rotary frequencies and causal masks, which a state dict may leave out.
            if plain_name(name) in self._buffers:
                set_tensor(self.module, plain_name(name), buffer)
        if self.layerwise is not None and not self._runs_by_layers():
            return self.fill()
        return self.module

    @property
    def holds_copies(self) -> bool:
        """Whether some weight is a copy of its own and not the training model's tensor."""
        return bool(self._flat) or self.layerwise is not None

    def _runs_by_layers(self) -> bool:
        """Whether a few tokens run with the weights of each layer alone, tried once; if not, all will be gathered."""
        if self._layers_suffice:
            return True
        problem = self.layerwise.problem()
        self._layers_suffice = self._agreed(problem is None, self.layerwise.partitioned)
        if not self._layers_suffice:
            warnings.warn(
                f"{type(self.module).__name__} does not run with one layer's weights at a time ({problem}): all are "
                "gathered at once, which takes the memory of the whole model on every device.",
                stacklevel=2,
            )
            self.layerwise.abandon()
            self.layerwise, self._wants_layerwise = None, False
        return self._layers_suffice

    def _agreed(self, here: bool, distributed: bool) -> bool:
        """Whether all ranks say so, where they gather together."""
        device = next(self.model.parameters()).device
        answer = torch.tensor(int(here), dtype=torch.int32, device=device)
        if distributed:
            dist.all_reduce(answer, op=dist.ReduceOp.MIN)
        return bool(answer)

    def release(self) -> None:
        """Let go of all weights: every parameter is on the meta device again. Under ZeRO-3 ranks may wait here."""
        try:
            if self.layerwise is not None:
                self.layerwise.release()
        finally:
            self.layerwise = None
            for name, parameter in self._meta.items():
                set_tensor(self.module, name, parameter)
            if not self.pin:
                self._flat = {}

    def _check_names(self, sources: list[WeightSource]) -> None:
        present = {name for source in sources for name, _ in source.parameters}
        present |= {other for name in present & self._same.keys() for other in self._same[name]}
        if present != self._meta.keys():
            odd = sorted(present ^ self._meta.keys())
            raise ValueError(
                f"the weights of {type(self.model).__name__} and of its config differ in {len(odd)} names, "
                f"{', '.join(odd[:4])} …: modules were added or removed after loading; "
                "fold them into the model before training, or change the config with them."
            )

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self.dtype if self.dtype is not None and parameter.is_floating_point() else parameter.dtype

    def _is_copied(self, source: WeightSource, parameter: nn.Parameter) -> bool:
        # A ZeRO-3 parameter falls apart again, even if it is whole at the moment.
        return hasattr(parameter, "ds_id") or source.folds(parameter) or parameter.dtype != self._dtype(parameter)

    def _converted(self, source: WeightSource, parameter: nn.Parameter) -> Tensor:
        """The plain weight in the dtype of generation, while what it needs is gathered."""
        weight = folded_weight(source.layer) if source.folds(parameter) else parameter.detach()
        return weight.to(self._dtype(parameter))

    def _copy_layerwise(self, sources: list[WeightSource], copies: dict[str, tuple[torch.Size, torch.dtype]]) -> bool:
        """Whether copies come layer by layer; all ranks of ZeRO-3 answer the same."""
        if self._wants_layerwise is not None or self._flat:
            return bool(self._wants_layerwise)
        device = next(self.model.parameters()).device
        needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in copies.values())
        partitioned = any(is_partitioned(parameter) for source in sources for parameter in source.needed)
        return not self._agreed(needed <= self.memory_fraction * free_memory(device), partitioned)

    def _rooms(self, copies: dict[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
        """A place for each copy in the flat buffer of its dtype; the same places every time."""
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

    def _put(self, name: str, weight: Tensor) -> None:
        """Set a parameter under all its names."""
        parameter = nn.Parameter(weight, requires_grad=False)
        for same in self._same[name]:
            set_tensor(self.module, same, parameter)


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a parameter or buffer in its place, by its dotted name, as it is (an alias stays an alias)."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    shelf = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
    shelf[leaf] = tensor
