"""The C++ operations of a decoding step on a CPU, built with g++ in seconds when first used."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

from dschat.generation.sampling import SamplingParams

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC")
DTYPES = (torch.float32, torch.bfloat16)
# Multiplications below which waking a second thread costs more than it brings.
THREAD_WORTH = 1 << 18


class CPUKernels:
    """The loaded library; tensors are checked here, since C++ would read past them in silence."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._attention = loaded.decode_attention
        self._attention.argtypes = [pointer] * 8 + [real, real, ctypes.c_int, ctypes.c_int]
        self._attention.restype = None
        self._draw = loaded.draw_tokens
        self._draw.argtypes = [pointer] * 4 + [integer] * 4 + [ctypes.c_double, real, ctypes.c_int, ctypes.c_int]
        self._draw.restype = None

    def decode_attention(
        self,
        query: Tensor,
        new_key: Tensor,
        new_value: Tensor,
        keys: Tensor,
        values: Tensor,
        spans: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Put each row's newest key and value into the pool, then attend; see attention.decode_attention."""
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
            *new_value.stride()[:2], window or 0,
        )  # fmt: skip
        self._attention(
            out.data_ptr(), query.data_ptr(), new_key.data_ptr(), new_value.data_ptr(), keys.data_ptr(),
            values.data_ptr(), spans.data_ptr(), ctypes.addressof(sizes), scale, softcap or 0.0,
            query.dtype == torch.bfloat16, torch.get_num_threads() if rows * heads * width > 4096 else 1,
        )  # fmt: skip
        return out

    def sample_tokens(self, logits: Tensor, uniform: Tensor | None, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """sampling.sample_tokens in one pass over each row: the same arguments and results, up to rounding."""
        rows, vocabulary = logits.shape
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        if logits.dtype not in DTYPES:
            logits = logits.float()
        if not params.greedy and (uniform.shape != (rows,) or uniform.dtype != torch.float32):
            raise ValueError(f"uniform is {uniform.dtype} {tuple(uniform.shape)}, but there are {rows} rows of logits")
        uniform = None if params.greedy else uniform.contiguous()
        tokens = torch.empty(rows, dtype=torch.long)
        logprobs = torch.empty(rows)
        self._draw(
            tokens.data_ptr(), logprobs.data_ptr(), logits.data_ptr(), None if uniform is None else uniform.data_ptr(),
            rows, vocabulary, logits.stride(0), params.top_k, params.top_p, params.temperature,
            logits.dtype == torch.bfloat16, torch.get_num_threads() if rows * vocabulary > THREAD_WORTH else 1,
        )  # fmt: skip
        return tokens, logprobs


@functools.cache
def load() -> CPUKernels | None:
    """The kernels of this processor, built if they are not there yet; None, with a warning, where they cannot be."""
    try:
        library = _folder() / f"cpu_kernels-{_identity()}.so"
        if not library.exists():
            _build(library)
        return CPUKernels(library)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        warnings.warn(f"the CPU kernels of generation cannot be built, decoding is slower ({reason})", stacklevel=2)
        return None


def _folder() -> Path:
    """Where torch's extensions are built, see dschat.launch; else a folder of the environment."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen is None and sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        chosen = os.path.join(sys.prefix, "torch_extensions")
    folder = Path(chosen or os.path.join(tempfile.gettempdir(), f"dschat-{os.getuid()}"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _identity() -> str:
    """Of source, flags and processor: -march=native code dies on an older one, and the folder may be shared."""
    info = Path("/proc/cpuinfo")
    flags = next((line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))), "") \
        if info.exists() else ""  # fmt: skip
    parts = [SOURCE.read_text(encoding="utf-8"), *FLAGS, _compiler(), flags]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _build(library: Path) -> None:
    """Compile beside and rename: ranks may build at once, and one that is killed leaves nothing half done."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, library.name)
        command = [_compiler(), *FLAGS, str(SOURCE), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        built.rename(library)


def _compiler() -> str:
    return os.environ.get("CXX", "g++")
