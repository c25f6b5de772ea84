"""Folders that are written atomically: to a temporary folder, checksummed in a manifest, synced, then renamed.

Files that a later run reuses (data, tables, checkpoints) are always verified first: `folder_problems` compares them
with the manifest. Unfinished folders of killed processes are removed by the next process that writes beside them;
a file lock, released when its process ends, protects those that are still being written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dschat.arguments.strict_json import read_json_object
from dschat.distributed import watchdog

MANIFEST = "manifest.json"
_LOCK = ".lock"
_UNFINISHED = ".unfinished"
_LOCKED_WITHIN = 60.0  # seconds from creation in which a folder may not be locked yet
_ABANDONED_AFTER = 86400.0  # seconds after which an unlocked folder counts as abandoned


@contextmanager
def written_folder(target: Path) -> Iterator[Path]:
    """A temporary folder to write to; at the end it is renamed to `target`, replacing a damaged folder there.

    If killed at any moment, `target` is never an incomplete folder that `folder_problems` accepts. If another
    process finished first, its folder is kept.

    Raises: OSError if it cannot be written; the temporary folder is removed after any exception.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(target.parent)
    temporary = _unique_name(target)
    temporary.mkdir()
    try:
        with _locked(temporary):
            yield temporary
            (temporary / _LOCK).unlink()
            write_atomically(temporary / MANIFEST, json.dumps({"files": digests(temporary)}, indent=1))
            sync_all(temporary)
            _rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def folder_problems(target: Path) -> list[str]:
    """Verify a folder made by `written_folder`: a line per missing file, wrong size or wrong checksum."""
    try:
        files = read_json_object(target / MANIFEST)["files"]
        return file_problems(target, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]


def file_problems(folder: Path, files: Mapping[str, Sequence]) -> list[str]:
    """Verify files (name → size, SHA-256): a line for each that is missing or differs.

    Raises: OSError if a file cannot be read.
    """
    problems = []
    for name, (size, expected) in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        elif digest(path) != expected:
            problems.append(f"{name} has a different checksum")
    return problems


def remove_unfinished(parent: Path) -> None:
    """Remove unfinished folders of killed processes."""
    for path in parent.glob(f"*{_UNFINISHED}"):
        with suppress(OSError):  # another process is removing or completing it
            if _is_abandoned(path):
                _remove(path)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file atomically and durably: temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def sync_all(folder: Path) -> None:
    """fsync a folder with all its files and subfolders."""
    for path in [folder, *folder.rglob("*")]:
        sync(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digests(folder: Path, *, share: tuple[int, int] = (0, 1)) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of the files of a folder; share (k, n): of every n-th file, starting at the k-th."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())[share[0] :: share[1]]
    return {path.relative_to(folder).as_posix(): (path.stat().st_size, digest(path)) for path in paths}


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
            watchdog.progress()
    return hasher.hexdigest()


def _rename(temporary: Path, target: Path) -> None:
    """Rename a complete folder to its final name; a damaged folder there is removed."""
    for attempt in range(5):
        try:
            temporary.rename(target)
            sync(target.parent)
            return
        except OSError:
            if not target.exists() or attempt == 4:
                raise
            if not folder_problems(target):  # another process finished first, with the same content
                return
            damaged = _unique_name(target)
            with suppress(FileNotFoundError):  # another process has removed it
                target.rename(damaged)
                _remove(damaged)


def _unique_name(target: Path) -> Path:
    return target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}{_UNFINISHED}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / _LOCK).open("w", encoding="utf-8") as lock:
        with suppress(OSError):  # without file locks, _is_abandoned goes by the age of the folder
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _is_abandoned(path: Path) -> bool:
    try:
        lock: IO[str] = (path / _LOCK).open("r+", encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):  # not locked yet, about to be renamed, or written by an old version
        return _age(path) > _ABANDONED_AFTER
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return _age(path) > _ABANDONED_AFTER
        return time.time() - (path / _LOCK).stat().st_mtime > _LOCKED_WITHIN


def _age(path: Path) -> float:
    """Seconds since anything in it was modified."""
    newest = max(inner.stat().st_mtime for inner in [path, *(path.rglob("*") if path.is_dir() else ())])
    return time.time() - newest
