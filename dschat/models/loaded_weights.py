"""Checks of a model's weights after loading: no parameter is missing, none is NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from dschat.distributed import collectives, watchdog
from dschat.models.weight_files import nonfinite_tensors
from dschat.models.weights import is_partitioned


def require_complete(model: PreTrainedModel, missing: set[str], path: str | Path, *, new_head: bool) -> None:
    """Raise ValueError if parameters are missing from the weights; new_head: only the backbone's are required."""
    backbone = f"{model.base_model_prefix}."
    missing_names = sorted(k for k in missing if not new_head or (k.startswith(backbone) and ".pooler." not in k))
    if missing_names:
        raise ValueError(
            f"the weights in {path} lack {len(missing_names)} parameters of {type(model).__name__} "
            f"({', '.join(missing_names[:3])}, …), which would be random: choose a complete model of this kind."
        )


def require_finite(model: PreTrainedModel, path: str | Path, *, untested: set[str]) -> None:
    """Raise ValueError if a parameter has NaN or an infinity; names the tensors and their files.

    Costs one pass over the weights, about 5 % of the load time. Under ZeRO-3 each rank tests its own partition, and
    all ranks raise together; they must all call this.

    Args:
        untested: names of parameters that were not loaded and are initialised later.
    """
    nonfinite = list(_nonfinite_parameters(model, untested))
    if any(is_partitioned(p) for p in model.parameters()):
        nonfinite = sorted(set(collectives.all_gather_lists(nonfinite)))
    if not nonfinite:
        return
    in_files = nonfinite_tensors(_folder_of(path))
    if in_files:
        file, tensor, value = in_files[0]
        more = f" (and {len(in_files) - 1} more tensors)" if len(in_files) > 1 else ""
        raise ValueError(
            f"{path}: the tensor {tensor} in {file} has {value} values{more}: copy the model again, or choose one "
            "that was saved before its training diverged."
        )
    raise ValueError(
        f"{path}: {nonfinite[0]} has NaN or infinite values{_and_more(nonfinite)} in {_dtype_name(model.dtype)}, "
        "though its files have none: load it in a dtype with more range (--dtype bf16 or fp32)."
    )


def _nonfinite_parameters(model: PreTrainedModel, untested: set[str]) -> Iterator[str]:
    named = [(name, _local_values(p)) for name, p in model.named_parameters() if name not in untested]
    named = [(name, values) for name, values in named if values.is_floating_point() and values.numel()]
    extremes = []  # compared only at the end, because each comparison waits for the device
    for _, values in named:
        # NaN propagates into both. aminmax has no kernels for 8-bit floats.
        least, largest = torch.aminmax(values.bfloat16() if values.element_size() == 1 else values)
        extremes.append(torch.stack([least, largest]).double())
        watchdog.progress()
    for (name, _), (least, largest) in zip(named, map(Tensor.tolist, extremes), strict=True):
        if not (-torch.inf < least and largest < torch.inf):
            yield name


def _local_values(parameter: torch.nn.Parameter) -> Tensor:
    """The values of a parameter that this rank holds; none on the meta device."""
    if parameter.is_meta:
        return torch.empty(0)
    if not is_partitioned(parameter):
        return parameter.detach()
    partition = parameter.ds_tensor.detach()
    # The last partitions are padded with uninitialised memory.
    start = torch.distributed.get_rank(parameter.ds_process_group) * partition.numel()
    return partition[: max(0, parameter.ds_numel - start)]


def _folder_of(path: str | Path) -> Path:
    return Path(path) if Path(path).is_dir() else Path(cached_file(str(path), "config.json")).parent


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
