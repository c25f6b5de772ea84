"""Build the DeepSpeed engine of a trained model from its argument groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
from torch import nn

from dschat.arguments import DeviceArguments, LoraArguments, OptimizerArguments
from dschat.arguments.command_line import as_settings_errors
from dschat.distributed import groups, watchdog
from dschat.distributed.deepspeed_config import training_config, with_overrides
from dschat.distributed.engines import trainable_engine
from dschat.models.lora import add_lora, optimizer_groups


@dataclass(frozen=True, kw_only=True)
class ModelHyperparameters:
    """The flags that differ between the trained models of a run, such as --actor_learning_rate."""

    learning_rate: float
    weight_decay: float
    zero_stage: int
    lora_dim: int


def build_trainable(
    load: Callable[[dict[str, Any]], nn.Module],
    model: ModelHyperparameters,
    *,
    micro_batch_size: int,
    total_steps: int,
    optimizer: OptimizerArguments,
    lora: LoraArguments,
    devices: DeviceArguments,
) -> deepspeed.DeepSpeedEngine:
    """Build the DeepSpeed engine of one trained model: configuration, network, adapters, optimizer and schedule.

    Args:
        load: builds the network, given the DeepSpeed configuration; under ZeRO-3 the weights are partitioned.
        micro_batch_size: sequences per device and forward pass.
        total_steps: number of optimizer steps, for the learning-rate schedule.
    """
    config = training_config(
        dtype=devices.dtype,
        zero_stage=model.zero_stage,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=optimizer.gradient_accumulation_steps,
        world_size=groups.data_parallel_size(),
        max_grad_norm=optimizer.max_grad_norm,
        offload=devices.offload,
    )
    config = with_overrides(config, devices.deepspeed_config)
    watchdog.phase("model loading")
    with as_settings_errors():
        network = load(config)
        if model.lora_dim:
            add_lora(network.model, dim=model.lora_dim, **lora.options)
    parameter_groups = optimizer_groups(
        network, learning_rate=model.learning_rate, lora_learning_rate=lora.lora_learning_rate,
        weight_decay=model.weight_decay,
    )  # fmt: skip
    watchdog.phase("engine")
    return trainable_engine(
        network,
        config=config,
        parameter_groups=parameter_groups,
        adam_betas=(optimizer.adam_beta1, optimizer.adam_beta2),
        lr_scheduler_type=optimizer.lr_scheduler_type,
        num_warmup_steps=optimizer.num_warmup_steps,
        num_training_steps=total_steps,
    )
