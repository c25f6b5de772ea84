"""C++ kernels of a decoding step on a CPU; see cpp_build for how they are compiled."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dschat.generation.sampling import SamplingParams
from dschat.models.cpu.library import (
    DTYPES,
    FLAG,
    INTEGER,
    POINTER,
    REAL,
    CompiledLibrary,
    load_library,
)

if TYPE_CHECKING:
    from dschat.generation.kv_pool.attention import Contexts, Scoring

# Logits per call below which sampling runs in a single thread, as waking others would cost more than it saves.
SINGLE_THREAD_LOGITS = 1 << 15
SINGLE_THREAD_WEIGHTS = 1 << 15  # elements of a linear layer's weight, likewise
TEAM_FUNCTION = ctypes.CFUNCTYPE(None)


class DecodingKernels(CompiledLibrary):
    """Kernels of a decoding step on float32 or bfloat16 CPU tensors, without gradients."""

    def __init__(self) -> None:
        signatures = {
            "decode_attention": [POINTER] * 8 + [REAL, REAL, FLAG, FLAG],
            "draw_tokens": [POINTER] * 4 + [INTEGER] * 4 + [ctypes.c_double, REAL, FLAG, FLAG],
            "pack": [POINTER, POINTER, INTEGER, INTEGER, FLAG],
            "linear": [POINTER] * 4 + [INTEGER] * 4 + [FLAG],
            "run_with_team": [FLAG, TEAM_FUNCTION],
        }
        super().__init__(Path(__file__).with_name("cpp_kernels.cpp"), signatures)
        self._packed_size = self._loaded.packed_size
        self._packed_size.argtypes, self._packed_size.restype = [INTEGER, INTEGER], INTEGER

    def decode_attention(
        self, query: Tensor, new_key: Tensor, new_value: Tensor, contexts: Contexts, scoring: Scoring
    ) -> Tensor:
        """Write each row's newest key and value to the pool, then attend; see kv_pool.attention.decode_attention."""
        keys, values, spans = contexts.keys, contexts.values, contexts.spans
        rows, heads, width = query.shape
        kv_heads, value_width = values.shape[1:]
        query, new_key, new_value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, new_key, new_value))
        if not (
            query.dtype == new_key.dtype == new_value.dtype == keys.dtype == values.dtype
            and query.dtype in DTYPES and spans.dtype == torch.long
            and keys.is_contiguous() and values.is_contiguous() and spans.is_contiguous()
            and keys.shape[1:] == (kv_heads, width) and new_key.shape == (rows, kv_heads, width)
            and new_value.shape == (rows, kv_heads, value_width) and spans.shape == (rows, 4)
        ):  # fmt: skip
            shapes = [(tuple(x.shape), x.dtype) for x in (query, new_key, new_value, keys, values, spans)]
            raise ValueError(f"decode_attention: shapes and dtypes do not fit together: {shapes}")
        out = query.new_empty(rows, heads, value_width)
        sizes = (ctypes.c_int64 * 12)(
            rows, heads, kv_heads, width, value_width, *query.stride()[:2], *new_key.stride()[:2],
            *new_value.stride()[:2], scoring.window or 0,
        )  # fmt: skip
        self._run(
            "decode_attention", out.data_ptr(), query.data_ptr(), new_key.data_ptr(), new_value.data_ptr(),
            keys.data_ptr(), values.data_ptr(), spans.data_ptr(), sizes, scoring.scale, scoring.softcap or 0.0,
            query.dtype == torch.bfloat16, torch.get_num_threads() if rows * heads * width > 4096 else 1,
        )  # fmt: skip
        return out

    def sample_tokens(self, logits: Tensor, uniform: Tensor | None, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """sampling.sample_tokens in one pass over each row: same arguments and results, up to rounding."""
        rows, vocabulary = logits.shape
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        if logits.dtype not in DTYPES:
            logits = logits.float()
        if not params.greedy and (uniform.shape != (rows,) or uniform.dtype != torch.float32):
            raise ValueError(f"uniform is {uniform.dtype} {tuple(uniform.shape)}, but there are {rows} rows of logits")
        uniform = None if params.greedy else uniform.contiguous()
        tokens = torch.empty(rows, dtype=torch.long)
        logprobs = torch.empty(rows)
        self._run(
            "draw_tokens", tokens.data_ptr(), logprobs.data_ptr(), logits.data_ptr(),
            None if uniform is None else uniform.data_ptr(), rows, vocabulary, logits.stride(0), params.top_k,
            params.top_p, params.temperature, logits.dtype == torch.bfloat16,
            torch.get_num_threads() if rows * vocabulary > SINGLE_THREAD_LOGITS else 1,
        )  # fmt: skip
        return tokens, logprobs

    def run_with_team(self, function: ctypes._CFuncPtr, *, threads: int) -> None:
        """Call a function on this thread; threads of its kernels stay awake until it returns.

        torch's own operations run in a single thread in the meantime.

        Args:
            function: a TEAM_FUNCTION, which must not raise.
        """
        self._loaded.run_with_team(threads, function)

    @property
    def multiplies_bf16(self) -> bool:
        """Whether the processor has the bf16 instructions that `linear` needs."""
        return self._packed_size(1, 1) > 0

    def pack(self, weight: Tensor, packed: Tensor | None = None) -> Tensor:
        """Pack a bfloat16 weight [out, in] into the flat layout of `linear`, in the given tensor or a new one."""
        if weight.dtype != torch.bfloat16 or weight.dim() != 2:
            raise ValueError(f"pack: the weight is {weight.dtype} {tuple(weight.shape)}, not a bfloat16 matrix")
        size = self._packed_size(*weight.shape)
        packed = weight.new_empty(size) if packed is None else packed
        if packed.shape != (size,) or packed.dtype != torch.bfloat16:
            raise ValueError(f"pack: {tuple(weight.shape)} needs {size} elements, not {tuple(packed.shape)}")
        weight = weight.contiguous()
        self._run("pack", packed.data_ptr(), weight.data_ptr(), *weight.shape, torch.get_num_threads())
        return packed

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        """x [..., in] times a packed weight's transpose, plus bias [out] → [..., out]; bf16, accumulated in float32."""
        in_features = x.shape[-1]
        fits = packed.shape == (self._packed_size(out_features, in_features),)
        if not (fits and x.dtype == packed.dtype == torch.bfloat16 and (bias is None or bias.shape == (out_features,))):
            raise ValueError(f"linear: x {x.dtype} {tuple(x.shape)} does not fit to {out_features} packed outputs")
        x = x if x.is_contiguous() else x.contiguous()
        out, rows = x.new_empty(*x.shape[:-1], out_features), x.numel() // in_features
        self._run(
            "linear", out.data_ptr(), x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(),
            rows, in_features, out_features, in_features,
            torch.get_num_threads() if in_features * out_features > SINGLE_THREAD_WEIGHTS else 1,
        )  # fmt: skip
        return out


@functools.cache
def load() -> DecodingKernels | None:
    """The kernels, compiled if needed; None, with a warning, if they cannot be built."""
    return load_library(DecodingKernels, consequence="decoding and sampling run in torch's operations, slower")
