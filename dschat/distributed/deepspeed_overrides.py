"""Validate the file of --deepspeed_config before a run starts: unknown keys, keys that flags set, DeepSpeed's rules."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils import logger as deepspeed_logger
from pydantic import ValidationError

from dschat.arguments.strict_json import kind_of, read_json_object
from dschat.distributed.deepspeed_config import training_config, with_overrides
from dschat.distributed.deepspeed_values import value_problems

_BATCHES = "--per_device_train_batch_size (step 3: --per_device_training_batch_size)"
SET_BY_FLAGS = {  # key → the flags that set it; includes aliases and keys that DeepSpeed looks up only on use
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
    """Validate a --deepspeed_config without building an engine; a line per problem.

    Args:
        dtype, offload: of the run; a file may repeat the dtype.
    """
    try:
        changes = read_json_object(path, unique_keys=True)
    except ValueError as error:
        return [f"--deepspeed_config {error}"]
    repeatable = {"bf16.enabled": dtype == "bf16", "fp16.enabled": dtype == "fp16"}
    problems = _unknown_keys(changes) + [
        f"{key} is set by {flags}: remove the key, and set the flag"
        for key, flags in SET_BY_FLAGS.items()
        if _contains(changes, key) and not (key in repeatable and _value_of(changes, key) is repeatable[key])
    ]
    problems += _wrong_types(changes)
    problems = problems or value_problems(changes)
    return [f"--deepspeed_config {path}: {line}" for line in problems or _deepspeed_errors(path, dtype, offload)]


class _RecordedReads(dict):
    """A dict that records every key that is looked up in it, present or not."""

    def __init__(self, content: dict[str, Any], recorded: set[str]) -> None:
        super().__init__(content)
        self.recorded = recorded

    def __contains__(self, key: object) -> bool:
        self.recorded.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.recorded.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.recorded.add(key)
        return super().get(key, default)

    def keys(self) -> _RecordedReads:  # type: ignore[override]
        return self  # DeepSpeed looks up `key in config.keys()`

    def __copy__(self) -> _RecordedReads:
        return _RecordedReads(self, self.recorded)


@functools.cache
def deepspeed_keys() -> frozenset[str]:
    """The top-level keys of a DeepSpeed configuration: those that the installed version looks up."""
    recorded = {key.partition(".")[0] for key in SET_BY_FLAGS}
    config = training_config(
        dtype="fp32", zero_stage=0, micro_batch_size=1, gradient_accumulation_steps=1, world_size=_world_size(),
        max_grad_norm=1.0,
    )  # fmt: skip
    with _errors_only():
        DeepSpeedConfig(_RecordedReads(config, recorded))
    return frozenset(recorded)


def _unknown_keys(changes: dict[str, Any]) -> list[str]:
    """Top-level keys that DeepSpeed ignores without a warning, each with the closest existing key."""
    problems = []
    for key in changes:
        if key not in deepspeed_keys():
            nearest = difflib.get_close_matches(key, deepspeed_keys(), n=1)
            remedy = f"did you mean {nearest[0]}?" if nearest else "remove it"
            problems.append(f"{key} is not a key of a DeepSpeed configuration, and would be ignored: {remedy}")
    return problems


@contextmanager
def _errors_only() -> Iterator[None]:
    """Inside, DeepSpeed logs errors only."""
    level = deepspeed_logger.level
    deepspeed_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        deepspeed_logger.setLevel(level)


def _contains(changes: dict[str, Any], key: str) -> bool:
    group, _, name = key.rpartition(".")
    inside = changes.get(group) if group else changes
    return isinstance(inside, dict) and name in inside


def _value_of(changes: dict[str, Any], key: str) -> Any:
    group, _, name = key.rpartition(".")
    return (changes[group] if group else changes)[name]


def _wrong_types(changes: dict[str, Any]) -> list[str]:
    """Values of types that DeepSpeed does not check: they would cause errors much later, or be misread."""
    expected = dict.fromkeys(GROUPS, (dict, "an object")) | dict.fromkeys(SWITCHES, (bool, "true or false"))
    expected |= dict.fromkeys(NUMBERS, ((int, float), "a number"))
    return [
        f"{key} must be {name}, not {kind_of(changes[key])}"
        for key, (kind, name) in expected.items()
        if key in changes and (not isinstance(changes[key], kind) or (key in NUMBERS and changes[key] is True))
    ]


def _deepspeed_errors(path: str, dtype: str, offload: bool) -> list[str]:
    """Errors of DeepSpeed's own reader, a line each."""
    config = training_config(
        dtype=dtype, zero_stage=3, micro_batch_size=1, gradient_accumulation_steps=1, world_size=_world_size(),
        max_grad_norm=1.0, offload=offload,
    )  # fmt: skip
    try:
        with _errors_only():
            DeepSpeedConfig(with_overrides(config, path))
    except ValidationError as error:
        return [
            f"{'.'.join(map(str, detail['loc'])) or error.title}: {detail['msg']} (DeepSpeed's {error.title})"
            for detail in error.errors()
        ]
    except Exception as error:  # DeepSpeed's readers raise many types; building an engine would raise them too
        return [f"DeepSpeed refuses it ({type(error).__name__}: {' '.join(str(error).split())[:300]})"]
    return []


def _world_size() -> int:
    """The world size that DeepSpeed's reader assumes."""
    from deepspeed import comm

    return comm.get_world_size() if comm.is_initialized() else 1
