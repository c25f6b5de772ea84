"""Remove stale build locks of JIT-compiled DeepSpeed ops, left by killed builds; torch would wait on them for ever.

A lock is an empty file that the building process keeps open. One that no process of this machine has open is stale,
unless another machine or user builds in the same folder: every machine registers its name there at each start.
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
POLL_SECONDS = 1.0
MACHINES = ".machines"
MACHINE_EXPIRY_SECONDS = 24 * 3600  # a machine may still begin a build this long after its last start


def clear_stale_build_locks(builds: Path) -> None:
    """Remove locks of killed builds; for a lock that may belong to another machine or user, wait first.

    Args:
        builds: folder of torch extensions.

    Raises:
        SettingsError: this user is not allowed to remove a stale lock.
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
            time.sleep(POLL_SECONDS)


def _is_stale(lock: Path, *, shared: bool, waited: float) -> bool:
    """Whether a lock that no visible process of this machine holds belongs to a build that has ended."""
    try:
        status = lock.stat()
    except FileNotFoundError:
        return True  # its build has just ended
    may_be_hidden = os.getuid() not in (0, status.st_uid)  # only root can list the open files of other users
    return not (shared or may_be_hidden) or max(waited, time.time() - status.st_mtime) > LONGEST_BUILD_SECONDS


def _remove(lock: Path) -> None:
    try:
        lock.unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(
            f"{lock} is left over from a killed build, and cannot be removed ({error.strerror}): remove it, or set "
            "TORCH_EXTENSIONS_DIR to a folder of your own"
        ) from error


def _other_machines(builds: Path) -> bool:
    """Whether other machines have used this folder recently; registers this machine."""
    folder, now = builds / MACHINES, time.time()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / socket.gethostname()).touch()
    with suppress(OSError):
        return any(
            other.name != socket.gethostname() and now - other.stat().st_mtime < MACHINE_EXPIRY_SECONDS
            for other in folder.iterdir()
        )
    return False


def _is_open(file: Path) -> bool:
    """Whether a process of this machine, visible to this user, has the file open."""
    path = str(file.resolve())
    return any(_opens(process, path) for process in Path("/proc").glob("[0-9]*"))


def _opens(process: Path, path: str) -> bool:
    """Whether a process (its folder in /proc) has the file open; False for other users' processes."""
    try:
        return any(os.path.realpath(link) == path for link in (process / "fd").iterdir())
    except OSError:
        return False
