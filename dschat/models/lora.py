"""LoRA adapters, and optimizer parameter groups with a separate LoRA learning rate."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dschat.models.lora_layers import is_lora_layer
from dschat.models.weights import full_shape, pretrained_model

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

logger = logging.getLogger(__name__)

HEADS = ("score", "classifier")  # of scalar-head models: always trained, never adapted


def add_lora(
    module: nn.Module,
    *,
    dim: int,
    module_name: str | Sequence[str],
    only_optimize_lora: bool,
    alpha: float | None = None,
    dropout: float = 0.0,
) -> None:
    """Add LoRA adapters to linear layers, in place: y = W x + (alpha / dim) · B A x, with B = 0 initially.

    A depends only on torch's seed and the layer's order in the model, so it is equal on ranks with the same seed.

    Args:
        module: a Hugging Face model, or TokenLogprobs or TokenScores around it; not yet in an engine.
        dim: rank r of A [r, in] and B [out, r], ≥ 1.
        module_name: substring of the names of the layers to adapt ("q_proj", "decoder.layers."), or "all"; or a list of
            whole names of layers (the last part or more of it). The output embedding and a scalar head are never
            adapted.
        only_optimize_lora: freeze everything but the adapters (and a scalar head); otherwise all is trained.
        alpha: the numerator of the scaling; None is 2 · dim.
        dropout: on the input of A.

    Raises:
        ValueError: dim < 1, or no layer matches module_name.

    Source: Hu et al. 2021, eq. 3 (arXiv:2106.09685).
    """
    from peft import LoraConfig, inject_adapter_in_model  # see lora_layers

    if dim < 1:
        raise ValueError(f"--lora_dim {dim}: the rank of an adapter must be at least 1; 0 trains without LoRA.")
    model = pretrained_model(module)
    targets = lora_targets(model, module_name)
    trained_before = {id(p): p.requires_grad for p in model.parameters()}
    config = LoraConfig(
        r=dim,
        lora_alpha=2 * dim if alpha is None else alpha,
        lora_dropout=dropout,
        # GPT-2's Conv1D stores its weight as [in, out].
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
    )
    # Hide the architecture from PEFT: it would replace these target modules by the experts' fused weights.
    wrapper = nn.Module()
    wrapper.model = model
    config.target_modules = {f"model.{name}" for name in targets}
    inject_adapter_in_model(config, wrapper)
    _share_adapters(model)
    _seed_adapters(model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            continue
        is_head = name.split(".")[0] in HEADS
        stays_trained = is_head or not only_optimize_lora
        parameter.requires_grad_(stays_trained and trained_before[id(parameter)])


def lora_targets(model: PreTrainedModel, module_name: str | Sequence[str]) -> list[str]:
    """Full names of the linear layers whose name contains module_name ("all" takes all of them), or is in the list.

    Excluded are layers whose forward is not a plain linear map (a router that also returns its choice), and those whose
    weight the parent module reads directly (Mamba's kernels): the adapter would have no effect in training but would be
    folded in on export. Experts with one fused weight tensor are not linear layers.

    Raises:
        ValueError: no layer matches; the message lists the available names.
    """
    output = model.get_output_embeddings()
    layers = [
        name
        for name, part in model.named_modules()
        if isinstance(part, (nn.Linear, Conv1D)) and part is not output and name.split(".")[0] not in HEADS
    ]
    adaptable = [name for name in layers if _is_adaptable(model, name)]
    if not isinstance(module_name, str):
        return _targets_of_names(model, adaptable, module_name)
    targets = adaptable if module_name == "all" else [name for name in adaptable if module_name in name]
    excluded = sorted({name.rsplit(".", 1)[-1] for name in layers if module_name in ("all", *name.split("."))} - {
        name.rsplit(".", 1)[-1] for name in targets
    })  # fmt: skip
    if not targets:
        kinds = sorted({name.rsplit(".", 1)[-1] for name in adaptable})
        why = " (its weight is also read without calling the layer, which would bypass the adapter)" if excluded else ""
        raise ValueError(
            f"--lora_module_name {module_name!r} matches no linear layer of {type(model).__name__} that can be "
            f"adapted{why}: use one of {', '.join(kinds)}, a longer part of a name such "
            f"as {(adaptable or layers)[0]!r}, or 'all'."
        )
    if excluded:
        logger.warning(
            "--lora_module_name %s: %s of %s get no adapters: their weights are also read without calling the layer",
            module_name, ", ".join(excluded), type(model).__name__,
        )  # fmt: skip
    return targets


def _targets_of_names(model: PreTrainedModel, adaptable: Sequence[str], names: Sequence[str]) -> list[str]:
    """The adaptable layers with one of these names, as PEFT's target_modules select them."""
    missing = [name for name in names if not any(f".{path}".endswith(f".{name}") for path in adaptable)]
    if missing:
        kinds = sorted({path.rsplit(".", 1)[-1] for path in adaptable})
        raise ValueError(
            f"--lora_target_modules {' '.join(missing)}: {type(model).__name__} has no such linear layer that can be "
            f"adapted: it has {', '.join(kinds)}."
        )
    return [path for path in adaptable if any(f".{path}".endswith(f".{name}") for name in names)]


def _is_adaptable(model: PreTrainedModel, name: str) -> bool:
    """Whether the layer is a plain linear map whose weight is used only by its own forward."""
    layer = model.get_submodule(name)
    if not (type(layer).forward is Conv1D.forward or _is_plain_linear(type(layer))):
        return False
    parent, _, leaf = name.rpartition(".")
    return not any(f"self.{leaf}.weight" in source for source in _method_sources(type(model.get_submodule(parent))))


@functools.cache
def _is_plain_linear(cls: type[nn.Linear]) -> bool:
    """Whether the forward of this nn.Linear subclass is x Wᵀ + b, tested on small random tensors."""
    if cls.forward is nn.Linear.forward:
        return True
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(shape, generator=generator) for shape in ((3, 5), (3,), (2, 5)))
    try:
        out = cls.forward(SimpleNamespace(weight=weight, bias=bias), x)
    except Exception:  # a custom forward may need other attributes
        return False
    return isinstance(out, torch.Tensor) and torch.allclose(out, nn.functional.linear(x, weight, bias), atol=1e-5)


@functools.cache
def _method_sources(cls: type) -> list[str]:
    """Source code of a module's methods, except initialisation."""
    sources = []
    for parent in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, method in vars(parent).items():
            if inspect.isfunction(method) and "init" not in name and not name.startswith("reset"):
                with suppress(OSError, TypeError):  # code without a source file
                    sources.append(inspect.getsource(method))
    return sources


def _share_adapters(model: PreTrainedModel) -> None:
    """Share one adapter between layers with tied weights, since it is folded into a single weight."""
    first: dict[int, LoraLayer] = {}
    for layer in model.modules():
        if is_lora_layer(layer):
            owner = first.setdefault(id(layer.get_base_layer().weight), layer)
            layer.lora_A, layer.lora_B = owner.lora_A, owner.lora_B


@torch.no_grad()
def _seed_adapters(model: PreTrainedModel) -> None:
    """Initialise A uniformly in ±1/√in as PEFT does, but from torch's initial seed, whatever was drawn before."""
    generator = torch.Generator().manual_seed(torch.initial_seed())
    for layer in model.modules():
        if is_lora_layer(layer):
            for a in layer.lora_A.values():
                bound = a.in_features**-0.5
                a.weight.copy_((2 * torch.rand(a.weight.shape, generator=generator) - 1) * bound)


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Set the adapters' scaling to 0, which gives the base model's outputs; restored on exit.

    The adapter layers still run, so that ZeRO-3 gathers the same parameters in the same order; W x + 0 · B A x equals
    W x bit for bit.
    """
    layers = [layer for layer in module.modules() if is_lora_layer(layer)]
    scalings = [dict(layer.scaling) for layer in layers]
    try:
        for layer in layers:
            layer.scaling.update(dict.fromkeys(layer.scaling, 0.0))
        yield
    finally:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling.update(scaling)


def optimizer_groups(
    module: nn.Module, *, learning_rate: float, lora_learning_rate: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups of the trainable parameters: no weight decay on biases and norms, a separate rate for LoRA.

    Args:
        module: any module; frozen parameters and empty groups are omitted.
        learning_rate: of everything but adapters.
        lora_learning_rate: of adapters; None is learning_rate.
        weight_decay: of parameters with two dimensions or more (as the model defined them, also under ZeRO-3).

    Raises:
        ValueError: nothing is trainable.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    adapters = [p for name, p in named if "lora_" in name]
    others = [p for name, p in named if "lora_" not in name]
    lora_rate = learning_rate if lora_learning_rate is None else lora_learning_rate

    def group(name: str, parameters: Iterable[nn.Parameter], lr: float, decay: float) -> dict[str, Any]:
        return {"name": name, "params": list(parameters), "lr": lr, "weight_decay": decay}

    groups = [
        group("weights", (p for p in others if len(full_shape(p)) > 1), learning_rate, weight_decay),
        group("biases_and_norms", (p for p in others if len(full_shape(p)) <= 1), learning_rate, 0.0),
        group("lora", adapters, lora_rate, weight_decay),
    ]
    groups = [g for g in groups if g["params"]]
    if not groups:
        raise ValueError(
            f"{type(module).__name__} has no trainable parameter, but an optimizer needs one: "
            "remove --only_optimize_lora, or set --lora_dim."
        )
    return groups
