"""Validate values in a --deepspeed_config that DeepSpeed accepts, but that would fail later or change the training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dschat.arguments.strict_json import kind_of


class Bounds(NamedTuple):
    """The range of a number."""

    least: float
    most: float = 2**62
    whole: bool = True


_SIZE = Bounds(1)
BOUNDS = {
    "steps_per_print": Bounds(1),
    "gradient_predivide_factor": Bounds(1e-6, 1e6, whole=False),
    "zero_optimization.reduce_bucket_size": _SIZE,
    "zero_optimization.allgather_bucket_size": _SIZE,
    "zero_optimization.sub_group_size": _SIZE,
    "zero_optimization.stage3_prefetch_bucket_size": Bounds(0),
    "zero_optimization.stage3_max_live_parameters": Bounds(0),
    "zero_optimization.stage3_max_reuse_distance": Bounds(0),
    "zero_optimization.stage3_param_persistence_threshold": Bounds(0),
    "zero_optimization.zero_hpz_partition_size": _SIZE,
    "fp16.initial_scale_power": Bounds(0, 127),
    "fp16.loss_scale_window": _SIZE,
    "fp16.hysteresis": _SIZE,
    "fp16.min_loss_scale": Bounds(0, 2.0**127, whole=False),
    "fp16.loss_scale": Bounds(0, 2.0**127, whole=False),
    "activation_checkpointing.number_checkpoints": _SIZE,
    "aio.block_size": _SIZE,
    "aio.queue_depth": _SIZE,
    "aio.thread_count": _SIZE,
    "aio.intra_op_parallelism": _SIZE,
    "flops_profiler.profile_step": Bounds(0),
}  # fmt: skip
SWITCHES = tuple(f"activation_checkpointing.{name}" for name in (
    "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "synchronize_checkpoint_boundary",
    "profile",
)) + ("aio.single_submit", "aio.overlap_events")  # fmt: skip
FIXED = {  # key → the only value that is supported, and why
    "hybrid_engine.enabled": (False, "--rollout_engine selects the rollout engine"),
    "data_efficiency.enabled": (False, "the data flags, such as --data_path, determine the rows of a step"),
    "checkpoint.load_universal": (False, "--resume loads checkpoints, also for another number of processes"),
    "zero_optimization.elastic_checkpoint": (False, "--resume loads checkpoints, also for another number of processes"),
    "zero_allow_untested_optimizer": (True, "the optimizer is torch's AdamW"),
    "zero_force_ds_cpu_optimizer": (False, "the optimizer is torch's AdamW"),
    "tensor_parallel.autotp_size": (0, "tensor parallelism is not supported"),
    "fp16.auto_cast": (False, "--dtype sets the precision"),
}


def value_problems(changes: dict[str, Any]) -> list[str]:
    """A line for each value that is out of bounds, of the wrong type, or not supported."""
    problems = [
        f'{key} is "auto", which only other frameworks replace by a value: set a value, or remove the key'
        for key, value in _leaves(changes)
        if value == "auto"
    ]
    for key, value in _leaves(changes):
        if key in BOUNDS and value != "auto":
            problems += _bound_problems(key, value, BOUNDS[key])
        elif key in SWITCHES and not isinstance(value, bool):
            problems.append(f"{key} must be true or false, not {kind_of(value)}")
        elif key in FIXED and value != FIXED[key][0]:
            problems.append(f"{key} must be {str(FIXED[key][0]).lower()}: {FIXED[key][1]}; remove the key")
    return problems + _offload_problems(changes) + _partition_problems(changes)


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every entry that is not an object."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _bound_problems(key: str, value: Any, bounds: Bounds) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        unchecked = key.startswith(("aio.", "activation_checkpointing."))  # DeepSpeed checks the types of the others
        return [f"{key} must be a number, not {kind_of(value)}"] if unchecked and value is not None else []
    whole = not bounds.whole or value == int(value)
    if whole and bounds.least <= value <= bounds.most:
        return []
    kind = "a whole number" if bounds.whole else "a number"
    return [f"{key} is {value:g}, and must be {kind} from {bounds.least:g} to {bounds.most:g}"]


def _offload_problems(changes: dict[str, Any]) -> list[str]:
    """Offloading to NVMe needs an existing nvme_path."""
    zero, problems = changes.get("zero_optimization"), []
    for name in ("offload_optimizer", "offload_param"):
        offload = zero.get(name) if isinstance(zero, dict) else None
        if not isinstance(offload, dict) or offload.get("device") != "nvme":
            continue
        path = offload.get("nvme_path")
        if not isinstance(path, str) or not Path(path).is_dir():
            problems.append(
                f"zero_optimization.{name}.device is nvme, and its nvme_path "
                f"{'is missing' if path is None else f'{path} is not a folder'}: name a folder on that disk"
            )
    return problems


def _partition_problems(changes: dict[str, Any]) -> list[str]:
    """The size of ZeRO++'s secondary partition must divide the number of processes."""
    zero = changes.get("zero_optimization")
    size = zero.get("zero_hpz_partition_size", 1) if isinstance(zero, dict) else 1
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    if not isinstance(size, int) or size < 1 or processes % size == 0:
        return []
    return [f"zero_optimization.zero_hpz_partition_size {size} does not divide the {processes} processes of this run"]
