"""Whether the Triton kernels of the decoder can run here: the one thing to ask before importing them.

triton_attention.py and triton_sampling.py import triton at their top, which is an optional package; this file does not:

    if triton_kernels.available(query, keys):
        from dschat.generation.cuda.attention import decode_attention

Inside a CUDA graph Triton can launch only what it has compiled already: run each call once before capturing it.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

# Ampere: the first generation whose tensor cores take bfloat16.
OLDEST_CAPABILITY = (8, 0)


def available(*tensors: Tensor) -> bool:
    """Whether triton is installed and can run on these tensors.

    Args:
        tensors: those that a kernel would be given.

    Returns:
        True where all of them are on CUDA devices of compute capability ≥ 8.0, or where the environment has
        TRITON_INTERPRET=1: then the kernels run in Python, on tensors of any device. That is for tests: it is slow, and
        triton reads the variable while it is first imported, so it has to be set before.
    """
    if not _triton_is_installed():
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return all(x.is_cuda and torch.cuda.get_device_capability(x.device) >= OLDEST_CAPABILITY for x in tensors)


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
