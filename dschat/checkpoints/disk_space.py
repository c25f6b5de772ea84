"""Estimate the size of a checkpoint, and check before a save that the disk has room for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import deepspeed
import torch


def expected_bytes(engines: Iterable[deepspeed.DeepSpeedEngine]) -> int:
    """Approximate size of a checkpoint over all ranks: weights; if trained, Adam's moments, float32 weights."""
    total = 0
    for engine in engines:
        for parameter in engine.module.parameters():
            count = getattr(parameter, "ds_numel", parameter.numel())
            copy = 4 if parameter.dtype != torch.float32 or engine.zero_optimization_stage() else 0
            total += count * (parameter.element_size() + (8 + copy if parameter.requires_grad else 0))
    return total


def check_space(folder: Path, needed: int) -> None:
    """Raise OSError if the folder's disk has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"a checkpoint takes about {needed / 1e9:.2f} GB, the disk of {folder.parent} has {free / 1e9:.2f} GB "
            "left: lower --keep_checkpoints, or make room"
        )
