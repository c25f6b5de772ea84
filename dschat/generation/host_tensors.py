"""Numbers of the host on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Tensor | Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Integers of the host as a long tensor on the device, copied without waiting for what the device is doing."""
    tensor = torch.as_tensor(values, dtype=torch.long)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from pageable memory a copy waits
    return tensor.to(device, non_blocking=True)
