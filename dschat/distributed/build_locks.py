"""Locks of operations that are compiled at first use: those of builds that were killed, which torch waits for for ever.

A lock is an empty file that its process keeps open. So one that no process of this machine has open is stale, unless
another machine, or another user, builds into the same folder: every machine leaves its name there at each start.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from dschat.arguments.command_line import SettingsError

LONGEST_BUILD_SECONDS = 600
PAUSE_SECONDS = 1.0
MACHINES = ".machines"
MACHINE_FORGOTTEN_SECONDS = 24 * 3600  # how long after its last start a machine may still begin a build


def clear_stale_build_locks(builds: Path) -> None:
    """Remove locks of builds that were killed; wait for one that may be another machine's, as long as a build takes.

    Args:
        builds: folder of torch's extensions.

    Raises:
        SettingsError: a stale lock that this user may not remove.
    """
    shared = _other_machines(builds)
    for lock in sorted(builds.glob("deepspeed_*/lock")):
        started, announced = time.time(), False
        while lock.exists() and not _is_open(lock):
            if _is_stale(lock, shared=shared, waited=time.time() - started):
                _remove(lock)
                break
            if not announced:
                print(f"waiting for another machine or user to build an operation, {LONGEST_BUILD_SECONDS:.0f} s at "
                      f"most; if none does, remove {lock}", file=sys.stderr, flush=True)  # fmt: skip
                announced = True
            time.sleep(PAUSE_SECONDS)


def _is_stale(lock: Path, *, shared: bool, waited: float) -> bool:
    """Whether a lock that nobody here is seen to hold belongs to a build that has ended."""
    try:
        status = lock.stat()
    except FileNotFoundError:
        return True  # its build has just ended
    unseen = os.getuid() not in (0, status.st_uid)  # what other users have open only root can see
    return not (shared or unseen) or max(waited, time.time() - status.st_mtime) > LONGEST_BUILD_SECONDS


def _remove(lock: Path) -> None:
    try:
        lock.unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(
            f"{lock} is left of a build that was killed and cannot be removed ({error.strerror}): remove it, or set "
            "TORCH_EXTENSIONS_DIR to a folder of your own"
        ) from error


def _other_machines(builds: Path) -> bool:
    """Whether other machines have built here of late; notes that this one does."""
    folder, now = builds / MACHINES, time.time()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / socket.gethostname()).touch()
    with suppress(OSError):
        return any(
            other.name != socket.gethostname() and now - other.stat().st_mtime < MACHINE_FORGOTTEN_SECONDS
            for other in folder.iterdir()
        )
    return False


def _is_open(file: Path) -> bool:
    """Whether a process of this machine has the file open, as far as this user can see."""
    path = str(file.resolve())
    return any(_opens(process, path) for process in Path("/proc").glob("[0-9]*"))


def _opens(process: Path, path: str) -> bool:
    """Whether a process, by its folder in /proc, has the file open; False for those of other users."""
    try:
        return any(os.path.realpath(link) == path for link in (process / "fd").iterdir())
    except OSError:
        return False
