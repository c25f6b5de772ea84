"""The file of --deepspeed_config, checked before a run starts: keys that flags own, and what DeepSpeed would refuse."""

from __future__ import annotations

import logging
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils import logger as deepspeed_logger
from pydantic import ValidationError

from dschat.arguments.strict_json import kind_of, read_json_object
from dschat.distributed.deepspeed_config import training_config
from dschat.distributed.deepspeed_values import value_problems

_BATCHES = "--per_device_train_batch_size (step 3: --per_device_training_batch_size)"
OWNED = {  # key → the flags that set it
    "train_batch_size": f"{_BATCHES}, --gradient_accumulation_steps and the number of processes",
    "train_micro_batch_size_per_gpu": _BATCHES,
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "gradient_clipping": "--max_grad_norm",
    "optimizer": "--learning_rate, --weight_decay, --adam_beta1 and --adam_beta2",
    "scheduler": "--lr_scheduler_type and --num_warmup_steps",
    "bf16.enabled": "--dtype",
    "bfloat16": "--dtype (the key's other name is bf16)",
    "fp16.enabled": "--dtype",
    "amp": "--dtype",
    "torch_autocast": "--dtype",
    "data_types.grad_accum_dtype": "--dtype",
    "zero_optimization.stage": "--zero_stage (step 3: --actor_zero_stage and --critic_zero_stage)",
    "zero_optimization.cpu_offload": "--offload",
    "zero_optimization.cpu_offload_param": "--offload",
    "elasticity": "the launcher, which fixes the number of processes",
    "autotuning": f"{_BATCHES} and --zero_stage, which it would change",
}
GROUPS = (
    "bf16", "fp16", "data_types", "zero_optimization", "activation_checkpointing", "aio", "checkpoint", "comms_logger",
    "compile", "csv_monitor", "data_efficiency", "flops_profiler", "hybrid_engine", "tensorboard", "timers", "wandb",
)  # fmt: skip
NUMBERS = ("gradient_predivide_factor", "steps_per_print")
SWITCHES = (
    "prescale_gradients", "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_allgather",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last",
)  # fmt: skip


def override_problems(path: str, *, dtype: str, offload: bool) -> list[str]:
    """What makes a --deepspeed_config unusable, a line each; no engine is built for it.

    Args:
        dtype, offload: of the run; a file may repeat them.
    """
    where = f"--deepspeed_config {path}"
    try:
        changes = read_json_object(path, unique_keys=True)
    except ValueError as error:
        return [f"--deepspeed_config {error}"]
    agreed = {"bf16.enabled": dtype == "bf16", "fp16.enabled": dtype == "fp16"}
    problems = [
        f"{where}: {key} is set by {flags}: drop the key, and set the flag"
        for key, flags in OWNED.items()
        if _holds(changes, key) and not (key in agreed and _at(changes, key) is agreed[key])
    ]
    problems += [f"{where}: {line}" for line in _wrong_kinds(changes)]
    problems = problems or [f"{where}: {line}" for line in value_problems(changes)]
    return problems or [f"{where}: {line}" for line in _refusals(path, dtype, offload)]


def _holds(changes: dict[str, Any], key: str) -> bool:
    group, _, name = key.rpartition(".")
    inside = changes.get(group) if group else changes
    return isinstance(inside, dict) and name in inside


def _at(changes: dict[str, Any], key: str) -> Any:
    group, _, name = key.rpartition(".")
    return (changes[group] if group else changes)[name]


def _wrong_kinds(changes: dict[str, Any]) -> list[str]:
    """Values of kinds that DeepSpeed does not check, and fails of much later, or takes for others."""
    wanted = dict.fromkeys(GROUPS, (dict, "an object")) | dict.fromkeys(SWITCHES, (bool, "true or false"))
    wanted |= dict.fromkeys(NUMBERS, ((int, float), "a number"))
    return [
        f"{key} must be {name}, not {kind_of(changes[key])}"
        for key, (kind, name) in wanted.items()
        if key in changes and (not isinstance(changes[key], kind) or (key in NUMBERS and changes[key] is True))
    ]


def _refusals(path: str, dtype: str, offload: bool) -> list[str]:
    """What DeepSpeed's own reader refuses."""
    level = deepspeed_logger.level
    deepspeed_logger.setLevel(logging.ERROR)
    try:
        DeepSpeedConfig(training_config(
            dtype=dtype, zero_stage=3, micro_batch_size=1, gradient_accumulation_steps=1, world_size=_world_size(),
            max_grad_norm=1.0, offload=offload, overrides=path,
        ))  # fmt: skip
    except ValidationError as error:
        return [
            f"{'.'.join(map(str, fault['loc'])) or error.title}: {fault['msg']} (DeepSpeed's {error.title})"
            for fault in error.errors()
        ]
    except Exception as error:  # of DeepSpeed's many readers: whatever it is, an engine would end with it
        return [f"DeepSpeed refuses it ({type(error).__name__}: {' '.join(str(error).split())[:300]})"]
    finally:
        deepspeed_logger.setLevel(level)
    return []


def _world_size() -> int:
    """As DeepSpeed's reader counts it."""
    from deepspeed import comm

    return comm.get_world_size() if comm.is_initialized() else 1
