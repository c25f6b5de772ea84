"""LoRA adapters as a PEFT folder, which PEFT, transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from dschat.distributed import collectives, watchdog
from dschat.models.lora import HEADS
from dschat.models.lora_layers import is_lora_layer
from dschat.models.unfinished_folder import unfinished_folder
from dschat.models.weights import ExportError, gathered, pretrained_model

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

PREFIX = "base_model.model."  # of PEFT's names in its files
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def adapter_layers(module: nn.Module) -> dict[str, LoraLayer]:
    """The layers with an adapter, by their names in the model without adapters.

    Raises:
        ValueError: there are none.
    """
    named = pretrained_model(module).named_modules()
    layers = {name: layer for name, layer in named if is_lora_layer(layer)}
    if not layers:
        raise ValueError("the model has no adapters: train with --lora_dim (step 3: --actor_lora_dim) to have some.")
    return layers


def has_adapters(module: nn.Module) -> bool:
    return any(is_lora_layer(layer) for layer in module.modules())


def adapter_config(module: nn.Module, *, base_model: str | None = None) -> LoraConfig:
    """PEFT's description of the adapters that `add_lora` added.

    Args:
        base_model: folder or hub name of the model that they belong to.
    """
    from peft import LoraConfig  # see lora_layers

    layers = adapter_layers(module)
    layer = next(iter(layers.values()))
    (adapter,) = layer.active_adapters
    heads = sorted(name for name, _ in _scalar_head(module))
    return LoraConfig(
        task_type="SEQ_CLS" if heads else "CAUSAL_LM", modules_to_save=[heads[0].split(".")[0]] if heads else None,
        base_model_name_or_path=base_model, r=layer.r[adapter],
        lora_alpha=layer.lora_alpha[adapter], fan_in_fan_out=layer.fan_in_fan_out, target_modules=sorted(layers),
        inference_mode=True,
    )  # fmt: skip


def adapter_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of A [r, in] and B [out, r] of each layer, and of a scalar head, by their names in PEFT's files.

    They are on the CPU. A collective under ZeRO-3.
    """
    weights = {}
    for name, parameter in _scalar_head(module):
        with gathered([parameter]):
            weights[PREFIX + name] = parameter.detach().to("cpu", copy=True).contiguous()
    for name, layer in adapter_layers(module).items():
        pairs = ((part, getattr(layer, part)[adapter].weight) for part in ("lora_A", "lora_B")
                 for adapter in layer.active_adapters)  # fmt: skip
        for part, parameter in pairs:
            with gathered([parameter]):
                weights[f"{PREFIX}{name}.{part}.weight"] = parameter.detach().to("cpu", copy=True).contiguous()
        watchdog.progress()
    return weights


def save_adapters(module: nn.Module, folder: str | Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors into an existing folder, on every rank.

    A collective under ZeRO-3.

    Raises:
        OSError: a file could not be written.
    """
    _write(adapter_weights(module), adapter_config(module), Path(folder))


def export_adapters(
    module: nn.Module, folder: str | Path, tokenizer: PreTrainedTokenizerBase, *, base_model: str
) -> None:
    """Write a PEFT folder with the tokenizer, as export_model writes the merged model: rank 0 writes, the others wait.

    Args:
        base_model: folder or hub name of the model that was trained.

    Raises:
        ExportError: on every rank, if rank 0 failed to write.
    """
    weights, config = adapter_weights(module), adapter_config(module, base_model=base_model)
    problem = None
    if collectives.is_main():
        try:
            with watchdog.watch_folder(folder), unfinished_folder(Path(folder)) as unfinished:
                _write(weights, config, unfinished)
                tokenizer.save_pretrained(unfinished)
        except Exception as error:  # any error: the other ranks are waiting for the result
            problem = f"{type(error).__name__}: {error}"
    problem = collectives.broadcast_from_main(problem)
    if problem is not None:
        raise ExportError(f"the adapters could not be written to {folder}: {problem}")


def _write(weights: dict[str, Tensor], config: LoraConfig, folder: Path) -> None:
    config.save_pretrained(folder)
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _scalar_head(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and weights of a scalar head, which is trained with the adapters."""
    return [pair for pair in pretrained_model(module).named_parameters() if pair[0].split(".")[0] in HEADS]
