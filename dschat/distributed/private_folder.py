"""Folders for compiled ops that only this user can write to, since their content is executed."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path


def private_folder(parents: Sequence[str | Path]) -> Path:
    """The folder `dschat-UID` in the first of these parents where it is private to this user; created if missing.

    If none is private (a link, another user's, writable by others), warns and returns a temporary folder, which is
    removed when the process ends, so ops are rebuilt at every start.

    Raises: OSError if no folder can be created at all.
    """
    reasons = []
    for parent in map(Path, parents):
        folder = parent / f"dschat-{os.getuid()}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            reason = _privacy_problem(folder)
        except OSError as error:
            reason = str(error)
        if reason is None:
            return folder
        reasons.append(f"{folder}: {reason}")
    temporary = Path(tempfile.mkdtemp(prefix="dschat-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    text = f"built operations are stored in {temporary} for this process only ({'; '.join(reasons)})"
    warnings.warn(text, stacklevel=2)
    return temporary


def is_private_file(path: Path) -> bool:
    """Whether a regular file (no link) exists, is owned by this user, and not writable by others."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _privacy_problem(folder: Path) -> str | None:
    """Why a folder is not private: others may write to it or replace it; None if it is."""
    status, parent = folder.lstat(), folder.parent.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is a link or a file"
    if status.st_uid != os.getuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"its mode is {stat.S_IMODE(status.st_mode):o}: others may write there"
    if status.st_mode & 0o077:
        folder.chmod(0o700)  # created readable by an earlier version
    if parent.st_mode & 0o002 and not parent.st_mode & stat.S_ISVTX:
        return f"everybody may rename files in {folder.parent}"
    return None
