"""A second module of the same architecture for decoding, which borrows its weights from the training module."""

from __future__ import annotations

import copy
from collections import defaultdict

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat.models.weights import full_weights, plain_name


class GenerationModule:
    """A model without hooks, adapters, dropout or checkpointing, empty (on the meta device) except while in use.

    Filling it aliases the live parameters wherever they are whole and in the right dtype, so it costs memory only for
    weights that adapters change, for ZeRO-3 (whose parameters exist in pieces), and for another dtype.
    Training weights are only read.

    Attributes:
        module: the empty or filled model, of the training model's class and config.
    """

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype | None = None) -> None:
        """Build the skeleton.

        Args:
            model: the training model, adapters inside or not.
            dtype: of the weights while generating; None keeps each one's own.
        """
        self.model = model
        self.dtype = dtype
        with torch.device("meta"):
            self.module = type(model)(copy.deepcopy(model.config)).eval()
        self.module.requires_grad_(False)
        self._meta: dict[str, nn.Parameter] = dict(self.module.named_parameters(remove_duplicate=False))
        self._buffers = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        tied = defaultdict(list)
        for name, parameter in self._meta.items():
            tied[id(parameter)].append(name)
        self._tied: list[list[str]] = list(tied.values())

    def fill(self) -> PreTrainedModel:
        """Take the weights of this moment. Under ZeRO-3 a collective: every rank has to call it.

        Returns:
            The module, ready to run.

        Raises:
            ValueError: the training model's weights are not those of its class and config.
        """
        filled: dict[str, nn.Parameter] = {}
        for name, tensor in full_weights(self.model):
            if name in self._buffers:
                continue
            # A gathered ZeRO-3 parameter falls apart again when the next one comes: it has to be copied.
            passing = hasattr(tensor, "ds_id")
            weight = tensor.detach()
            if self.dtype is not None and weight.is_floating_point() and weight.dtype != self.dtype:
                weight = weight.to(self.dtype)
            elif passing:
                weight = weight.clone()
            filled[name] = nn.Parameter(weight, requires_grad=False)
        for names in self._tied:
            present = [name for name in names if name in filled]
            if present:
                filled.update({name: filled[present[0]] for name in names if name not in filled})
        if filled.keys() != self._meta.keys():
            odd = sorted(filled.keys() ^ self._meta.keys())
            raise ValueError(
                f"the weights of {type(self.model).__name__} and of its config differ in {len(odd)} names, "
                f"{', '.join(odd[:4])} …: modules were added or removed after loading; "
                "fold them into the model before training, or change the config with them."
            )
        for name, parameter in filled.items():
            _set_tensor(self.module, name, parameter)
        self._borrow_buffers()
        return self.module

    def release(self) -> None:
        """Let go of all weights: every parameter is on the meta device again."""
        for name, parameter in self._meta.items():
            _set_tensor(self.module, name, parameter)

    def _borrow_buffers(self) -> None:
        """Alias the buffers (rotary frequencies, causal masks), which also a state dict may leave out."""
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            if plain_name(name) in self._buffers:
                _set_tensor(self.module, plain_name(name), buffer)


def _set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a parameter or buffer in its place, by its dotted name, as it is (an alias stays an alias)."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    shelf = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
    shelf[leaf] = tensor
