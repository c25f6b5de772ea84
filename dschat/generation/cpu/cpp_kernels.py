"""C++ kernels of a decoding step on a CPU; see cpp_build for how they are compiled."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dschat.generation.cpu.cpp_build import built_library
from dschat.generation.sampling import SamplingParams

if TYPE_CHECKING:
    from dschat.generation.kv_pool.attention import Contexts, Scoring

DTYPES = (torch.float32, torch.bfloat16)
# Logits per call below which sampling runs in a single thread, as waking others would cost more than it saves.
SINGLE_THREAD_LOGITS = 1 << 15
# The same for the elements of an elementwise kernel, and for the weights of a linear layer.
SINGLE_THREAD_ELEMENTS = 1 << 15


class CPUKernels:
    """Wrapper of the loaded library; validates tensors, since the C++ code does no bounds checks.

    Attributes:
        recorder: a list to which every call is appended, see step_recording; None: calls are not recorded.
    """

    def __init__(self, library: Path) -> None:
        self.recorder: list[Callable[[], None]] | None = None
        loaded = ctypes.CDLL(str(library))
        pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._attention = loaded.decode_attention
        self._attention.argtypes = [pointer] * 8 + [real, real, ctypes.c_int, ctypes.c_int]
        self._attention.restype = None
        self._draw = loaded.draw_tokens
        self._draw.argtypes = [pointer] * 4 + [integer] * 4 + [ctypes.c_double, real, ctypes.c_int, ctypes.c_int]
        self._draw.restype = None
        self._packed_size = loaded.packed_size
        self._packed_size.argtypes, self._packed_size.restype = [integer, integer], integer
        self._pack = loaded.pack
        self._pack.argtypes = [pointer, pointer, integer, integer, ctypes.c_int]
        self._pack.restype = None
        self._linear = loaded.linear
        self._linear.argtypes = [pointer] * 4 + [integer] * 4 + [ctypes.c_int]
        self._linear.restype = None
        self._rms_norm = loaded.rms_norm
        self._rms_norm.argtypes = [pointer] * 3 + [integer] * 3 + [real, real, ctypes.c_int, ctypes.c_int]
        self._rms_norm.restype = None
        self._gated = loaded.gated
        self._gated.argtypes = [pointer] * 3 + [integer] * 4 + [ctypes.c_int] * 3
        self._gated.restype = None
        self._rotate = loaded.rotate
        self._rotate.argtypes = [pointer] * 5 + [ctypes.c_int, ctypes.c_int]
        self._rotate.restype = None

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
            self._attention, out.data_ptr(), query.data_ptr(), new_key.data_ptr(), new_value.data_ptr(),
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
            self._draw, tokens.data_ptr(), logprobs.data_ptr(), logits.data_ptr(),
            None if uniform is None else uniform.data_ptr(), rows, vocabulary, logits.stride(0), params.top_k,
            params.top_p, params.temperature, logits.dtype == torch.bfloat16,
            torch.get_num_threads() if rows * vocabulary > SINGLE_THREAD_LOGITS else 1,
        )  # fmt: skip
        return tokens, logprobs

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
        self._pack(packed.data_ptr(), weight.data_ptr(), *weight.shape, torch.get_num_threads())
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
            self._linear, out.data_ptr(), x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(),
            rows, in_features, out_features, in_features,
            torch.get_num_threads() if in_features * out_features > SINGLE_THREAD_ELEMENTS else 1,
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float, shift: float = 0.0) -> Tensor:
        """x / √(mean(x²) + eps) · (weight + shift) over the last dimension; x [..., D], weight [D] of x's dtype.

        Source: Zhang & Sennrich 2019 (arXiv:1910.07467), equation 4.
        """
        width = x.shape[-1]
        if not (x.dtype == weight.dtype and x.dtype in DTYPES and weight.shape == (width,) and weight.is_contiguous()):
            raise ValueError(f"rms_norm: x {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}")
        x = x if x.is_contiguous() else x.contiguous()
        out = torch.empty_like(x)
        self._run(
            self._rms_norm, out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.numel() // width, width, width, eps,
            shift, x.dtype == torch.bfloat16, _threads(x.numel()),
        )  # fmt: skip
        return out

    def gated(self, gate: Tensor, up: Tensor, *, gelu: bool = False) -> Tensor:
        """SiLU(gate) · up, or with the tanh form of GELU instead of SiLU; gate and up are [..., D].

        Source: Shazeer 2020 (arXiv:2002.05202), equation 6.
        """
        if not (gate.dtype == up.dtype and gate.dtype in DTYPES and gate.shape == up.shape):
            raise ValueError(f"gated: {gate.dtype} {tuple(gate.shape)} and {up.dtype} {tuple(up.shape)} do not fit")
        out, width = gate.new_empty(gate.shape), gate.shape[-1]
        gate, up = gate.reshape(-1, width), up.reshape(-1, width)  # views where rows are evenly spaced
        gate, up = (x if x.stride(-1) == 1 else x.contiguous() for x in (gate, up))
        self._run(
            self._gated, out.data_ptr(), gate.data_ptr(), up.data_ptr(), len(gate), width, gate.stride(0),
            up.stride(0), gelu, gate.dtype == torch.bfloat16, _threads(gate.numel()),
        )  # fmt: skip
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary position embedding with a head's halves paired: x [R, H, T, D], cos and sin [R or 1, T, D].

        Source: Su et al. 2021 (arXiv:2104.09864), equation 34, pairs (i, i + D/2).
        """
        rows, heads, tokens, width = x.shape
        if not (
            x.dtype == cos.dtype == sin.dtype and x.dtype in DTYPES and cos.shape == sin.shape and width % 2 == 0
            and cos.shape in ((rows, tokens, width), (1, tokens, width))
        ):  # fmt: skip
            shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in (x, cos, sin)]
            raise ValueError(f"rotate: shapes and dtypes do not fit together: {shapes}")
        x = x if x.stride(-1) == 1 else x.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        out = x.new_empty(rows, tokens, heads, width)
        sizes = (ctypes.c_int64 * 9)(
            rows, heads, tokens, width, *x.stride()[:3], tokens * width if len(cos) > 1 else 0, width
        )
        self._run(
            self._rotate, out.data_ptr(), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), sizes,
            x.dtype == torch.bfloat16, _threads(x.numel()),
        )  # fmt: skip
        return out.transpose(1, 2)

    def _run(self, function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)
        if self.recorder is not None:
            self.recorder.append(functools.partial(function, *arguments))


def _threads(elements: int) -> int:
    """Number of threads for an elementwise kernel over this many elements."""
    return torch.get_num_threads() if elements > SINGLE_THREAD_ELEMENTS else 1


@functools.cache
def load() -> CPUKernels | None:
    """Load the kernels, compiling them if needed; None, with a warning, if they cannot be built."""
    try:
        return CPUKernels(built_library())
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        warnings.warn(f"the CPU kernels of generation cannot be built, decoding is slower ({reason})", stacklevel=2)
        return None
