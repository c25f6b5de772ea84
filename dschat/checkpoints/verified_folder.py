"""Folders of files that are whole or not there: written beside, checksummed in a manifest, synced, then renamed.

What a run prepares and a later one finds again (data, tables, checkpoints) is never used unchecked: `folder_problems`
compares every file with the manifest. Folders that a killed process left unfinished are removed by the next one that
writes beside them; a lock, which ends with its process, keeps those that are still being written.
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

from dschat.distributed import watchdog
from dschat.strict_json import read_json_object

MANIFEST = "manifest.json"
_LOCK = ".lock"
_UNFINISHED = ".unfinished"
_YOUNG = 60.0  # seconds in which a folder may have been made, but not locked yet
_FORGOTTEN = 86400.0  # seconds after which a folder is nobody's where a file system has no locks


@contextmanager
def written_folder(place: Path) -> Iterator[Path]:
    """A temporary folder to write into; on leaving it becomes `place`, complete, in place of a damaged one.

    Killed at any moment, it leaves nothing at `place` that `folder_problems` would accept. Where another process was
    faster, its folder stays.

    Raises: OSError where it cannot be written; nothing of the attempt is left then, nor after any other exception.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(place.parent)
    temporary = _beside(place)
    temporary.mkdir()
    try:
        with _locked(temporary):
            yield temporary
            (temporary / _LOCK).unlink()
            write_atomically(temporary / MANIFEST, json.dumps({"files": digests(temporary)}, indent=1))
            sync_all(temporary)
            _rename(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def folder_problems(place: Path) -> list[str]:
    """What is wrong with a folder that `written_folder` made: missing files, other sizes, other checksums; or []."""
    try:
        files = read_json_object(place / MANIFEST)["files"]
        return file_problems(place, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]


def file_problems(folder: Path, files: Mapping[str, Sequence]) -> list[str]:
    """What of these files (name → size, SHA-256) is missing or another.

    Raises: OSError where one cannot be read.
    """
    problems = []
    for name, (size, expected) in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        elif digest(path) != expected:
            problems.append(f"{name} has another checksum")
    return problems


def remove_unfinished(parent: Path) -> None:
    """Remove what killed processes left unfinished in a folder."""
    for path in parent.glob(f"*{_UNFINISHED}"):
        with suppress(OSError):  # another process removes it too, or completes it
            if _is_abandoned(path):
                _remove(path)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that is there whole, and on the disk, or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def sync_all(folder: Path) -> None:
    """Put every file and folder on the disk."""
    for path in [folder, *folder.rglob("*")]:
        sync(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digests(folder: Path, *, share: tuple[int, int] = (0, 1)) -> dict[str, tuple[int, str]]:
    """Size and checksum of every n-th file from the k-th on, where share is (k, n)."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())[share[0] :: share[1]]
    return {path.relative_to(folder).as_posix(): (path.stat().st_size, digest(path)) for path in paths}


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
            watchdog.progress()
    return found.hexdigest()


def _rename(temporary: Path, place: Path) -> None:
    """Give a complete folder its name; a damaged one of that name is removed."""
    for attempt in range(5):
        try:
            temporary.rename(place)
            sync(place.parent)
            return
        except OSError:
            if not place.exists() or attempt == 4:
                raise
            if not folder_problems(place):  # another process was faster, with the same content
                return
            aside = _beside(place)
            with suppress(FileNotFoundError):  # another process has removed it
                place.rename(aside)
                _remove(aside)


def _beside(place: Path) -> Path:
    return place.with_name(f"{place.name}.{uuid.uuid4().hex[:8]}{_UNFINISHED}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / _LOCK).open("w", encoding="utf-8") as lock:
        with suppress(OSError):  # some network file systems have no locks: then its age protects the folder
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _is_abandoned(path: Path) -> bool:
    try:
        lock: IO[str] = (path / _LOCK).open("r+", encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):  # not locked yet, about to be renamed, or of an earlier release
        return _age(path) > _FORGOTTEN
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return _age(path) > _FORGOTTEN
        return time.time() - (path / _LOCK).stat().st_mtime > _YOUNG


def _age(path: Path) -> float:
    """Seconds since anything in it was written."""
    newest = max(inner.stat().st_mtime for inner in [path, *(path.rglob("*") if path.is_dir() else ())])
    return time.time() - newest
