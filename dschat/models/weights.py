"""Full weights with plain Hugging Face names, independent of ZeRO-3 partitioning and LoRA; export of the model."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from dschat.distributed import failpoint, watchdog
from dschat.models.lora_layers import is_lora_layer
from dschat.models.unfinished_folder import unfinished_folder

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


def is_partitioned(parameter: Tensor) -> bool:
    """True if the parameter is managed by ZeRO-3 and currently partitioned over the ranks."""
    return hasattr(parameter, "ds_id") and parameter.ds_status.name != "AVAILABLE"


def full_shape(parameter: Tensor) -> torch.Size:
    """The parameter's full shape, also while ZeRO-3 has it partitioned."""
    return getattr(parameter, "ds_shape", parameter.shape)


@contextlib.contextmanager
def gathered(parameters: list[nn.Parameter], *, modifier_rank: int | None = None) -> Iterator[None]:
    """Gather these parameters inside the context; no-op for those not partitioned.

    A collective under ZeRO-3. Changes made inside are lost unless modifier_rank is the rank whose values are kept.
    """
    partitioned = [p for p in parameters if is_partitioned(p)]
    if not partitioned:
        yield
        return
    import deepspeed  # slow to import, and only ZeRO-3 needs it here

    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=modifier_rank):
        yield


def pretrained_model(module: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside an engine (`.module`) and inside TokenLogprobs or TokenScores (`.model`).

    Raises:
        ValueError: the module contains no PreTrainedModel.
    """
    inner: object = module
    while not isinstance(inner, PreTrainedModel):
        child = getattr(inner, "module", None) or getattr(inner, "model", None)
        if child is None:
            raise ValueError(
                f"{type(module).__name__} contains no Hugging Face model, which defines the weights' names: "
                "pass a PreTrainedModel, a TokenLogprobs, a TokenScores, or an engine around one of them."
            )
        inner = child
    return inner


def full_weights(module: nn.Module, *, fold_adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the state dict that the plain Hugging Face model would have.

    Names are those of the model without adapters. A tied parameter is yielded once, under the name that
    `from_pretrained` ties the others to (the embedding, not the head). Persistent buffers are included.

    Under ZeRO-3 each module's parameters are gathered for its part of the iteration: all ranks must iterate to the end,
    and a tensor is valid until the next one (clone it to keep it). LoRA is folded in float32 and rounded once into a
    new tensor; training weights are never modified. Everything else is an alias of the live parameter.

    Args:
        module: any module that `pretrained_model` accepts.
        fold_adapters: False yields the weights that the adapters are added to.
    """
    for source in weight_sources(pretrained_model(module)):
        with gathered(source.needed):
            for name, parameter in source.parameters:
                folds = fold_adapters and source.folds(parameter)
                yield name, folded_weight(source.layer) if folds else parameter
        yield from source.buffers


def checkpoint_weights(module: nn.Module, *, fold_adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
    """full_weights with the names and shapes of the model's files, which transformers fuses while loading (experts).

    Fused weights are taken apart a decoder layer at a time; under ZeRO-3 that layer is copied.
    """
    model = pretrained_model(module)
    weights = full_weights(model, fold_adapters=fold_adapters)
    if not _has_other_names_in_files(model):
        yield from weights
        return
    for _, part in itertools.groupby(weights, key=lambda pair: _layer_of(pair[0])):
        # ZeRO-3 frees gathered parameters at the next step of the iteration.
        layer = {name: weight.detach().clone() if hasattr(weight, "ds_id") else weight for name, weight in part}
        yield from revert_weight_conversion(model, layer).items()


def _has_other_names_in_files(model: PreTrainedModel) -> bool:
    conversions = getattr(model, "_weight_conversions", None)
    return bool(get_model_conversion_mapping(model, add_legacy=False) if conversions is None else conversions)


def _layer_of(name: str) -> str:
    """The part of a parameter's name up to the first number, "" without one."""
    return re.match(r"(?:.*?\.\d+\.)?", name).group()


@dataclass(frozen=True)
class WeightSource:
    """One module of the training model, as the source of weights of the plain model.

    Attributes:
        path: the module's plain name.
        parameters: (plain name, training parameter) pairs.
        buffers: (plain name, persistent buffer) pairs.
        layer: the LoRA layer to fold into the module's weight, if any.
    """

    path: str
    parameters: list[tuple[str, nn.Parameter]]
    buffers: list[tuple[str, Tensor]]
    layer: LoraLayer | None

    def folds(self, parameter: nn.Parameter) -> bool:
        """Whether the plain weight is this parameter with an adapter folded in."""
        return self.layer is not None and parameter is self.layer.get_base_layer().weight

    @property
    def needed(self) -> list[nn.Parameter]:
        """Parameters to gather in order to compute the weights."""
        adapters = [] if self.layer is None else self.layer.named_parameters()
        return [p for _, p in self.parameters] + [p for n, p in adapters if n.startswith("lora_")]


def weight_sources(model: PreTrainedModel) -> Iterator[WeightSource]:
    """The modules of a model in order, without the adapters; gathers nothing."""
    kept_names = _names_to_keep(model)
    for path, part in model.named_modules():
        if ".lora_" in f".{path}":
            continue
        prefix = f"{path}." if path else ""
        own = part.named_parameters(recurse=False)
        buffers = ((n, b) for n, b in part.named_buffers(recurse=False) if n not in part._non_persistent_buffers_set)
        yield WeightSource(
            path=plain_name(prefix).removesuffix("."),
            parameters=[(plain_name(prefix + name), p) for name, p in own if prefix + name in kept_names],
            buffers=[(plain_name(prefix + name), buffer) for name, buffer in buffers],
            layer=_lora_layer(model, path),
        )


def plain_name(name: str) -> str:
    """The Hugging Face name of a parameter that LoRA moved into a base layer."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def folded_weight(layer: LoraLayer) -> Tensor:
    """W + scaling · B A of a LoRA layer as a new tensor, in float32 and rounded once to the dtype of W.

    Linear keeps W as [out, in], GPT-2's Conv1D as [in, out]; its parameters must be gathered.

    Source: Hu et al. 2021, eq. 3 (arXiv:2106.09685).
    """
    base = layer.get_base_layer().weight
    folded = base.detach().to(torch.float32, copy=True)
    for adapter in layer.active_adapters:
        delta = layer.lora_B[adapter].weight.float() @ layer.lora_A[adapter].weight.float()  # [out, in]
        folded += layer.scaling[adapter] * (delta.T if layer.fan_in_fan_out else delta)
    return folded.to(base.dtype)


def _lora_layer(model: PreTrainedModel, path: str) -> LoraLayer | None:
    """The LoRA layer whose base layer is at this path; None for other modules, and if merged or disabled."""
    if not path.endswith(".base_layer"):
        return None
    layer = model.get_submodule(path.removesuffix(".base_layer"))
    folds = is_lora_layer(layer) and not layer.merged and not layer.disable_adapters
    return layer if folds else None


def _names_to_keep(model: PreTrainedModel) -> set[str]:
    """One name per parameter object: of tied names, the first that is not declared tied to another."""
    copies = set(model.all_tied_weights_keys)
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = names.setdefault(id(parameter), name)
        if plain_name(first_name) in copies and plain_name(name) not in copies:
            names[id(parameter)] = name
    return set(names.values())


class ExportError(RuntimeError):
    """A model could not be written; the partial output was removed."""


def export_model(module: nn.Module, folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a plain Hugging Face folder: safetensors in the training dtype, LoRA folded in, config, tokenizer.

    All ranks call it; rank 0 holds at most one full copy and writes, the others wait until the files are written. Files
    are moved into place together, config.json last, so that an interrupted export leaves no partial model.

    Args:
        module: any module that `pretrained_model` accepts.
        folder: created if missing; files of the same names are replaced.
        tokenizer: saved with the weights, including its chat template.

    Raises:
        ExportError: on every rank, if rank 0 failed to write.
    """
    watchdog.phase("export")
    model = pretrained_model(module)
    distributed = dist.is_available() and dist.is_initialized()
    is_writer = not distributed or dist.get_rank() == 0
    state: dict[str, Tensor] = {}
    for name, tensor in full_weights(model):
        if is_writer:
            # ZeRO-3 frees gathered parameters at the next iteration; a live CPU parameter needs no copy.
            state[name] = tensor.detach().to("cpu", copy=hasattr(tensor, "ds_id"))
        watchdog.progress()
    problem = None
    if is_writer:
        with watchdog.watch_folder(folder):
            problem = _write_folder(model, Path(folder), tokenizer, state)
    if distributed:
        broadcast = [problem]
        dist.broadcast_object_list(broadcast, src=0)
        problem = broadcast[0]
    if problem is not None:
        raise ExportError(f"the model could not be written to {folder}: {problem}")


def _write_folder(
    model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase, state: dict[str, Tensor]
) -> str | None:
    """Write all files; returns None or the error message, which the caller broadcasts to all ranks."""
    try:
        with unfinished_folder(folder) as unfinished:
            failpoint.reached("export_begin")
            model.save_pretrained(unfinished, state_dict=state)
            failpoint.reached("export_weights")
            tokenizer.save_pretrained(unfinished)
            failpoint.reached("export_written")
    except Exception as error:  # any error: the other ranks are waiting for the result
        return f"{type(error).__name__}: {error}"
    return None
