"""Throughput and memory of training for the log: tokens per second, FLOP utilisation, padding, peak memory."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from deepspeed import DeepSpeedEngine

from dschat.data.micro_batches import MicroBatchLimit, StepRows
from dschat.distributed import collectives
from dschat.runs.flops import TRAINING_FACTOR, ModelShape, forward_flops, model_shape, peak_flops


@dataclass(frozen=True)
class Work:
    """What this rank's passes of some updates took.

    Attributes:
        sequences: number of them (of a pair both).
        tokens: real tokens, a prompt counted in each of its sequences.
        columns: tokens that were computed, padding included.
        needed: of these, those that are not padding.
        flops: of forward and backward passes, without padding.
    """

    sequences: float = 0.0
    tokens: float = 0.0
    columns: float = 0.0
    needed: float = 0.0
    flops: float = 0.0

    def tensor(self, device: torch.device) -> torch.Tensor:
        """[5] float64, to sum over ranks; Work(*values) is the inverse."""
        return torch.tensor(list(vars(self).values()), dtype=torch.float64, device=device)

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class TrainedModel:
    """Shape of a trained model (None if unknown), and how it is run."""

    shape: ModelShape | None
    limit: MicroBatchLimit

    def work(self, rows: StepRows) -> Work:
        """Work of an update over this rank's rows."""
        parts = self.limit.split(rows, budget=self.limit.budget(max(rows.lengths)))
        repeated = [length for group, length in rows.prompts for _ in group[1:]]
        tokens = sum(rows.lengths)
        needed = tokens - sum(repeated)
        columns = sum(len(part) * max(rows.lengths[row] for row in part) for part in parts)
        flops = 0.0
        if self.shape is not None:
            flops = forward_flops(self.shape, rows.lengths) - forward_flops(self.shape, repeated)
        columns = columns if self.limit.padded else needed
        return Work(len(rows.lengths), tokens, columns, needed, TRAINING_FACTOR * flops)


def trained_model(engine: DeepSpeedEngine, limit: MicroBatchLimit) -> TrainedModel:
    try:
        return TrainedModel(model_shape(engine.module.model), limit)
    except (AttributeError, TypeError):  # a config without the usual fields, as recurrent models have
        return TrainedModel(None, limit)


def throughput_metrics(work: Work, *, seconds: float, engine: DeepSpeedEngine, prefix: str = "") -> dict[str, float]:
    """Metrics of all ranks: tokens and samples per second, padding, mfu; and memory of this rank.

    The first two have the prefix. padding is its share of the computed tokens; samples are sequences.

    Args:
        work: of the updates of all ranks.
        seconds: that they took.
        engine: of a trained model, for device and precision.

    Returns: mfu is left out where the model's FLOPs or the device's peak are unknown.
    """
    if not seconds:
        return {}
    metrics = {
        f"{prefix}tokens_per_second": work.tokens / seconds, f"{prefix}samples_per_second": work.sequences / seconds,
        "padding": 1 - work.needed / max(work.columns, 1.0), "memory_gib": memory_gib(engine.device),
        "peak_memory_gib": peak_memory_gib(engine.device),
    }  # fmt: skip
    peak = peak_flops(engine.device, engine.module.model.dtype)
    if peak and work.flops:
        metrics["mfu"] = work.flops / (seconds * peak * collectives.world_size())
    return metrics


def memory_gib(device: torch.device) -> float:
    """Memory in use now, in GiB: of this process's tensors on a CUDA device, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory so far, in GiB: of this process's tensors on a CUDA device, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**20  # KiB
    except (OSError, IndexError):  # not Linux, where ru_maxrss starts with the peak of the parent process
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # bytes on macOS
