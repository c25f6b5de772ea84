"""Compiles C++ kernels with g++ on first use, which takes seconds, into a private folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from dschat.distributed.private_folder import is_private_file, private_folder

HEADERS = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC")


def built_library(source: Path) -> Path:
    """The path of the compiled library; compiles it if missing or writable by other users.

    Args:
        source: a C++ file with a C interface; it may include the headers beside this file.

    Raises:
        OSError, subprocess.SubprocessError: they cannot be compiled.
    """
    library = library_path(source)
    if not is_private_file(library):
        library.unlink(missing_ok=True)
        _build(source, library)
    return library


def library_path(source: Path) -> Path:
    """Where the library of a source lies once it is built, on this machine with this compiler."""
    return _folder() / f"{source.stem}-{_identity(source)}.so"


def _folder() -> Path:
    """A private folder below torch's extension directory (see distributed.launch), or below the temporary directory."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None and sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        root = os.path.join(sys.prefix, "torch_extensions")
    return private_folder([*([root] if root else []), tempfile.gettempdir()])


def _identity(source: Path) -> str:
    """Hash of source, headers, flags, compiler and CPU features.

    -march=native code may crash on another CPU that shares the folder.
    """
    info = Path("/proc/cpuinfo")
    flags = next((line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))), "") \
        if info.exists() else ""  # fmt: skip
    files = [source, *sorted(HEADERS.glob("*.h"))]
    parts = [*(file.read_text(encoding="utf-8") for file in files), *FLAGS, _compiler(), flags]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _build(source: Path, library: Path) -> None:
    """Compile in a temporary directory and rename: ranks may build concurrently, and a killed build leaves no file."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, library.name)
        command = [_compiler(), *FLAGS, "-I", str(HEADERS), str(source), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        built.chmod(0o700)  # whatever the umask: others must not be able to change what is loaded
        built.rename(library)


def _compiler() -> str:
    return os.environ.get("CXX", "g++")
