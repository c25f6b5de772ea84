"""Folders are complete or absent, whenever their writer is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dschat.checkpoints import verified_folder
from dschat.checkpoints.verified_folder import file_problems, folder_problems, remove_unfinished, written_folder


def write(target: Path, text: str = "content") -> None:
    with written_folder(target) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a.txt").write_text(text)
        (folder / "b.bin").write_bytes(bytes(range(100)))


WRITER = """
import sys, time
from pathlib import Path
from dschat.checkpoints.verified_folder import written_folder
with written_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("a")
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_written_folder_has_its_files_and_a_manifest_of_them(tmp_path):
    write(tmp_path / "x")
    assert folder_problems(tmp_path / "x") == []
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.txt", "b.bin", "inner", "manifest.json", "x"]


def test_every_flipped_bit_and_every_missing_file_is_found(tmp_path):
    write(tmp_path / "x")
    for file in (tmp_path / "x" / "inner" / "a.txt", tmp_path / "x" / "b.bin"):
        content = file.read_bytes()
        for index in range(len(content)):
            file.write_bytes(content[:index] + bytes([content[index] ^ 1 << index % 8]) + content[index + 1 :])
            (problem,) = folder_problems(tmp_path / "x")
            assert problem == f"{file.relative_to(tmp_path / 'x')} has a different checksum"
        file.write_bytes(content[:-1])
        assert "bytes instead of" in folder_problems(tmp_path / "x")[0]
        file.unlink()
        assert "is missing" in folder_problems(tmp_path / "x")[0]
        file.write_bytes(content)
    assert folder_problems(tmp_path / "x") == []
    for manifest in ("", "{}", "[]", '{"files": []}', '{"files": {"a": 3}}', "\xff"):
        (tmp_path / "x" / "manifest.json").write_text(manifest)
        assert "manifest.json" in folder_problems(tmp_path / "x")[0]
    assert "cannot be read" in folder_problems(tmp_path / "nothing")[0]


def test_an_exception_while_writing_leaves_no_files(tmp_path):
    with pytest.raises(KeyError), written_folder(tmp_path / "x") as folder:
        (folder / "a").touch()
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_folder_is_replaced_and_an_intact_one_is_kept(tmp_path):
    write(tmp_path / "x", "first")
    write(tmp_path / "x", "second")
    assert (tmp_path / "x" / "inner" / "a.txt").read_text() == "first", "another process has written it before"
    (tmp_path / "x" / "b.bin").unlink()
    write(tmp_path / "x", "second")
    assert (tmp_path / "x" / "inner" / "a.txt").read_text() == "second" and folder_problems(tmp_path / "x") == []
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_files_are_synced_before_the_folder_is_renamed(tmp_path, monkeypatch):
    synced, sync = [], verified_folder.sync
    monkeypatch.setattr(
        verified_folder, "sync", lambda path: (synced.append((path, (tmp_path / "x").exists())), sync(path))
    )
    write(tmp_path / "x")
    before = {path.name for path, renamed in synced if not renamed}
    assert {"a.txt", "b.bin", "inner", "manifest.json"} <= before
    assert synced[-1] == (tmp_path, True), "the parent folder after the rename"


def test_the_temporary_folder_of_a_killed_writer_is_removed_by_the_next_writer(tmp_path, monkeypatch):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "x"], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "ready\n"
    (temporary,) = tmp_path.iterdir()
    monkeypatch.setattr(verified_folder, "_LOCKED_WITHIN", -1.0)
    remove_unfinished(tmp_path)
    assert temporary.exists(), "its writer is alive"
    writer.kill()
    writer.communicate()
    assert not (tmp_path / "x").exists()
    write(tmp_path / "y")
    assert [path.name for path in tmp_path.iterdir()] == ["y"]


def test_an_unfinished_folder_without_lock_is_kept_for_a_day(tmp_path):
    """Its writer may be about to lock or rename it, or be an earlier release, which had no lock."""
    for path in (tmp_path / "a.unfinished", tmp_path / "b.unfinished"):
        path.mkdir()
        (path / "train.arrow").touch()
    (tmp_path / "c.arrow.1234.unfinished").touch()
    old = time.time() - 2 * 86400
    for path in (
        tmp_path / "a.unfinished",
        tmp_path / "c.arrow.1234.unfinished",
        tmp_path / "a.unfinished" / "train.arrow",
    ):
        os.utime(path, (old, old))
    remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["b.unfinished"]


def test_listed_files_are_compared_by_size_and_checksum(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of nothing
    assert file_problems(tmp_path, {"a": (0, empty)}) == []
    assert file_problems(tmp_path, {"a": [1, empty], "b": [0, empty]}) == ["a has 0 bytes instead of 1", "b is missing"]
