"""Asynchronous host-to-device copies of integers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Tensor | Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy host integers to the device as a long tensor, without synchronising with the device."""
    tensor = torch.as_tensor(values, dtype=torch.long)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from pageable memory would block
    return tensor.to(device, non_blocking=True)
