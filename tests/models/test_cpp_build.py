"""Where C++ kernels are built, and what happens if they cannot be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dschat.models.cpu import cpp_build, layer_kernels

SOURCE = Path(layer_kernels.__file__).with_suffix(".cpp")


def test_without_a_compiler_there_are_no_kernels_and_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(UserWarning, match="cannot be built.*no-such-compiler"):
        assert layer_kernels.load.__wrapped__() is None
    monkeypatch.setattr(
        subprocess, "run",
        lambda *_, **__: (_ for _ in ()).throw(subprocess.CalledProcessError(1, "c++", stderr="unknown flag")),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="unknown flag"):
        assert layer_kernels.load.__wrapped__() is None
    assert not list(tmp_path.rglob("*.so"))


def test_a_library_that_other_users_can_write_is_built_again(monkeypatch, tmp_path):
    """It has the right name, in our own folder, but its mode lets others write to it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library = cpp_build.library_path(SOURCE)
    library.write_bytes(b"not ours")
    library.chmod(0o666)
    loaded = layer_kernels.load.__wrapped__()
    assert loaded is not None and library.read_bytes()[:4] == b"\x7fELF"
    assert library.stat().st_mode & 0o777 == 0o700


def test_a_change_of_a_header_is_another_library(monkeypatch, tmp_path):
    header = tmp_path / "elements.h"
    header.write_text("// one")
    monkeypatch.setattr(cpp_build, "HEADERS", tmp_path)
    before = cpp_build.library_path(SOURCE)
    header.write_text("// two")
    assert cpp_build.library_path(SOURCE) != before


@pytest.mark.parametrize("where", ["TORCH_EXTENSIONS_DIR", "the temporary folder"])
def test_kernels_are_not_loaded_from_a_folder_that_another_user_may_have_created(where, monkeypatch, tmp_path):
    """Its name is predictable, so another user can create it first and put a library there."""
    parent = tmp_path / "shared"
    trap = parent / f"dschat-{os.getuid()}"
    trap.mkdir(parents=True)
    trap.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(parent))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)  # as outside a virtual environment
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    if where == "TORCH_EXTENSIONS_DIR":
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(parent))
    with pytest.warns(UserWarning, match="others may write there"):
        folder = cpp_build._folder()
    assert folder != trap and not list(folder.iterdir()) and folder.stat().st_mode & 0o777 == 0o700
