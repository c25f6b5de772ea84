"""A library of C++ kernels called through ctypes, without torch's build system: it compiles in seconds."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from dschat.models.cpu.cpp_build import built_library

DTYPES = (torch.float32, torch.bfloat16)
POINTER, INTEGER, REAL, FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
# Elements of an elementwise kernel below which it runs in a single thread, as waking others would cost more.
SINGLE_THREAD_ELEMENTS = 1 << 16

Loaded = TypeVar("Loaded", bound="CompiledLibrary")


class CompiledLibrary:
    """The functions of a C++ file. Subclasses validate tensors, since the C++ code does no bounds checks.

    Attributes:
        recorder: of all libraries: a list to which every call is appended, see generation.cpu.step_recording; None:
            calls are not recorded.
    """

    recorder: ClassVar[list[Callable[[], None]] | None] = None

    def __init__(self, source: Path, signatures: dict[str, list[Any]]) -> None:
        """signatures: argument types of each function that returns nothing, by its name."""
        self._loaded = ctypes.CDLL(str(built_library(source)))
        for name, arguments in signatures.items():
            function = getattr(self._loaded, name)
            function.argtypes, function.restype = arguments, None

    def _run(self, name: str, *arguments: object) -> None:
        function = getattr(self._loaded, name)
        function(*arguments)
        if CompiledLibrary.recorder is not None:
            CompiledLibrary.recorder.append(functools.partial(function, *arguments))


def load_library(library: Callable[[], Loaded], *, consequence: str) -> Loaded | None:
    """Compile and load a library; None, with a warning, if it cannot be built.

    Args:
        consequence: of running without these kernels, for the warning.
    """
    try:
        return library()
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        warnings.warn(f"C++ kernels cannot be built: {consequence} ({reason})", stacklevel=3)
        return None


def thread_count(elements: int) -> int:
    """Number of threads for an elementwise kernel over this many elements."""
    return torch.get_num_threads() if elements > SINGLE_THREAD_ELEMENTS else 1
