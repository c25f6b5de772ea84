"""Dispatches token sampling to the fastest implementation for the device."""

from __future__ import annotations

from torch import Tensor

from dschat.generation.cpu import cpp_kernels
from dschat.generation.cuda import triton_kernels
from dschat.generation.sampling import SamplingParams, sample_tokens, vocabulary_logits


def draw_tokens(
    logits: Tensor, uniform: Tensor | None, params: SamplingParams, *, kernels: bool = True,
    allow_host_sync: bool = True,
) -> tuple[Tensor, Tensor]:
    """sampling.sample_tokens, by a kernel where available; same arguments, same tokens up to rounding."""
    logits = vocabulary_logits(logits, params)
    if kernels and logits.device.type == "cpu" and (library := cpp_kernels.load()):
        return library.sample_tokens(logits, uniform, params)
    untruncated = not params.top_k and params.top_p == 1  # the Triton kernel does not truncate
    if kernels and logits.is_cuda and (params.greedy or untruncated) and triton_kernels.available(logits):
        from dschat.generation.cuda.sampling import sample  # imports triton, which is optional

        return sample(logits, uniform, temperature=params.temperature)
    return sample_tokens(logits, uniform, params, allow_host_sync=allow_host_sync)
