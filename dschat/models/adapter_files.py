"""LoRA adapters as a PEFT folder, which PEFT, transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from dschat.distributed import watchdog
from dschat.models.weights import gathered, pretrained_model

PREFIX = "base_model.model."  # of PEFT's names in its files
WEIGHTS_FILE = "adapter_model.safetensors"


def adapter_layers(module: nn.Module) -> dict[str, LoraLayer]:
    """The layers with an adapter, by their names in the model without adapters.

    Raises:
        ValueError: there are none.
    """
    named = pretrained_model(module).named_modules()
    layers = {name: layer for name, layer in named if isinstance(layer, LoraLayer)}
    if not layers:
        raise ValueError("the model has no adapters: train with --lora_dim (step 3: --actor_lora_dim) to have some.")
    return layers


def adapter_config(module: nn.Module, *, base_model: str | None = None) -> LoraConfig:
    """PEFT's description of the adapters that `add_lora` added.

    Args:
        base_model: folder or hub name of the model that they belong to.
    """
    layers = adapter_layers(module)
    layer = next(iter(layers.values()))
    (adapter,) = layer.active_adapters
    return LoraConfig(
        task_type="CAUSAL_LM", base_model_name_or_path=base_model, r=layer.r[adapter],
        lora_alpha=layer.lora_alpha[adapter], fan_in_fan_out=layer.fan_in_fan_out, target_modules=sorted(layers),
        inference_mode=True,
    )  # fmt: skip


def adapter_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of A [r, in] and B [out, r] of each layer on the CPU, by their names in PEFT's files.

    A collective under ZeRO-3.
    """
    weights = {}
    for name, layer in adapter_layers(module).items():
        pairs = ((part, getattr(layer, part)[adapter].weight) for part in ("lora_A", "lora_B")
                 for adapter in layer.active_adapters)  # fmt: skip
        for part, parameter in pairs:
            with gathered([parameter]):
                weights[f"{PREFIX}{name}.{part}.weight"] = parameter.detach().to("cpu", copy=True).contiguous()
        watchdog.progress()
    return weights


def save_adapters(module: nn.Module, folder: str | Path, *, base_model: str | None = None) -> None:
    """Write adapter_config.json and adapter_model.safetensors into an existing folder, on every rank that calls it.

    A collective under ZeRO-3.

    Raises:
        OSError: a file could not be written.
    """
    weights = adapter_weights(module)
    adapter_config(module, base_model=base_model).save_pretrained(folder)
    save_file(weights, Path(folder) / WEIGHTS_FILE, metadata={"format": "pt"})
