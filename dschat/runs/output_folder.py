"""Lock the output folder against other runs, and verify that all nodes share it."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import IO

from dschat.distributed import collectives

VISIBLE_WITHIN = 15.0  # seconds: network file systems cache directory listings, and show new files late

_locks: dict[Path, IO[str]] = {}


def lock_folder(output_dir: str | Path) -> None:
    """Lock an output folder until this process ends. A collective.

    On a file system without locks it only prints a warning.

    Raises:
        ValueError: another run holds the lock, or the folder is not writable.
    """
    problem = _lock(Path(output_dir)) if collectives.is_main() else None
    problem = collectives.broadcast_from_main(problem)
    if problem:
        raise ValueError(problem)


def _lock(output_dir: Path) -> str | None:
    """Lock the folder for the lifetime of the process; returns None, or why it failed."""
    path = (output_dir / ".lock").resolve()
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        return f"--output_dir {output_dir}: {path.name} cannot be written there ({error.strerror}): name another folder"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # PermissionError if flock is emulated over NFS
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        return (
            f"--output_dir {output_dir}: another run is writing there ({holder}): wait for it, end it, or name another "
            "folder"
        )
    except OSError as error:
        print(
            f"warning: --output_dir {output_dir}: its file system cannot lock files ({error.strerror}), so a "
            "second run in this folder is not detected: do not start one",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _locks[path] = file  # closing it would release the lock
    return None


def check_shared(output_dir: str | Path) -> None:
    """Verify that all nodes share the output folder, since all ranks write checkpoints. A collective.

    Raises:
        ValueError: on some nodes it is a different folder.
    """
    token = collectives.broadcast_from_main(f".shared-{uuid.uuid4().hex}")
    path, problem = Path(output_dir, token), None
    if collectives.is_main():
        try:
            path.touch()
        except OSError as error:
            problem = f"--output_dir {output_dir}: cannot be written ({error.strerror}): name another folder"
    problem = collectives.broadcast_from_main(problem)
    if problem is None:
        hosts = collectives.all_gather_lists([] if _wait_until_visible(path) else [socket.gethostname()])
        if collectives.is_main():
            path.unlink(missing_ok=True)
        if hosts:
            names = ", ".join(sorted(set(hosts))[:8])
            problem = (
                f"--output_dir {output_dir}: files that rank 0 writes there are not visible on {names}: all ranks "
                "write checkpoints, so name a folder on a file system that all nodes share"
            )
    if problem:
        raise ValueError(problem)


def _wait_until_visible(path: Path) -> bool:
    deadline = time.monotonic() + VISIBLE_WITHIN
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
        if path.parent.is_dir():
            os.listdir(path.parent)  # makes network file systems refresh their cache
    return True
