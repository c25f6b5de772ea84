"""Availability check for the decoder's Triton kernels, to be called before importing them.

attention.py, kv_writes.py and sampling.py in this package import triton, an optional dependency; this module does
not:

    if triton_kernels.available(query):
        from dschat.generation.cuda.attention import decode_attention

Triton cannot compile during CUDA graph capture: run each call once before capturing it.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

# Ampere: the first generation with bfloat16 tensor cores.
MIN_CAPABILITY = (8, 0)


def available(*tensors: Tensor) -> bool:
    """Whether triton is installed and can run on these tensors.

    Args:
        tensors: the arguments of a kernel call.

    Returns:
        True if all of them are on CUDA devices of compute capability ≥ 8.0, or if the environment has
        TRITON_INTERPRET=1: then the kernels are interpreted in Python, on tensors of any device. That is slow and meant
        for tests; the variable must be set before triton is first imported.
    """
    if not _triton_is_installed():
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return all(x.is_cuda and torch.cuda.get_device_capability(x.device) >= MIN_CAPABILITY for x in tensors)


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
