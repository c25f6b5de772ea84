"""Build the DeepSpeed configuration: ZeRO, precision, offload, batch sizes."""

from typing import Any

import torch

from dschat.arguments.strict_json import read_json_object

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def training_config(
    *,
    dtype: str,
    zero_stage: int,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    world_size: int,
    max_grad_norm: float,
    offload: bool = False,
) -> dict[str, Any]:
    """The configuration of a trained model.

    Args:
        dtype: "bf16", "fp16" or "fp32".
        micro_batch_size: sequences per device and forward pass.
        max_grad_norm: global L2 norm at which gradients are clipped; 0: no clipping.
        offload: keep optimizer states, and ZeRO-3 parameters, in host memory.
    """
    config = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "train_batch_size": micro_batch_size * gradient_accumulation_steps * world_size,
        "gradient_clipping": max_grad_norm,
        "steps_per_print": 2**31,  # dschat.runs.run_log reports progress
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW handles offloaded states without a compiled op
        "zero_allow_untested_optimizer": True,
        **_precision(dtype),
        "zero_optimization": _zero(zero_stage, offload),
    }
    if zero_stage == 2 and world_size == 1 and not offload:
        # No gradients to partition: stage 1 accumulates them without stage 2's copies to buckets. With offload, stage 2
        # keeps them in host memory.
        config["zero_optimization"]["stage"] = 1
    if dtype == "bf16" and zero_stage > 0:  # without ZeRO, DeepSpeed's bf16 optimizer only accumulates in bf16
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def frozen_config(
    *, dtype: str, zero_stage: int, micro_batch_size: int, world_size: int, offload: bool = False
) -> dict[str, Any]:
    """The configuration of a frozen model: partitioned under ZeRO-3 or with offload, else replicated."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "train_batch_size": micro_batch_size * world_size,
        "steps_per_print": 2**31,
        **_precision(dtype),
        "zero_optimization": _zero(3 if zero_stage == 3 or offload else 0, offload),
    }


def _precision(dtype: str) -> dict[str, Any]:
    return {"bf16": {"enabled": dtype == "bf16"}, "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 16}}


def _zero(stage: int, offload: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {
            "overlap_comm": True,
            "stage3_gather_16bit_weights_on_model_save": False,  # dschat.models.weights gathers and writes
            "stage3_param_persistence_threshold": 10_000,
        }
    if offload and stage >= 1:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload and stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return zero


def with_overrides(config: dict[str, Any], path: str | None) -> dict[str, Any]:
    """The configuration, merged recursively with the JSON file of --deepspeed_config if there is one."""
    return config if path is None else _merged(config, read_json_object(path, unique_keys=True))


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    nested = {key: _merged(base[key], changes[key]) for key in base.keys() & changes.keys()
              if isinstance(base[key], dict) and isinstance(changes[key], dict)}  # fmt: skip
    return base | changes | nested
