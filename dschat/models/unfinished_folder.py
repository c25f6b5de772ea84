"""Crash-safe writing of a model folder: files are staged and moved together, so a partial model is never loadable."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dschat.checkpoints.verified_folder import sync

STAGING = ".unfinished"  # staging directory until all files are written
MOVED_LAST = "config.json"  # moved last: without it the folder is not a model
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


@contextmanager
def unfinished_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty staging directory inside `folder` (created if missing); its files move up when the block ends.

    The files get the permissions that the umask leaves, and are fsynced before the move. Files of the same names are
    replaced, weights of a previous model are removed. If the block raises, `folder` is unchanged and the staged files
    are deleted, and `folder` too if new.

    Raises:
        OSError: the files cannot be written.
    """
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / STAGING
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        readable = temporary.stat().st_mode & 0o666  # what the umask leaves: safetensors writes for the owner alone
        for path in [temporary, *temporary.rglob("*")]:
            if path.is_file():
                path.chmod(readable)
            sync(path)
        _move_up(temporary, folder)
        temporary.rmdir()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if created and not any(folder.iterdir()):
            folder.rmdir()


def _move_up(temporary: Path, folder: Path) -> None:
    new = sorted(temporary.iterdir(), key=lambda path: (path.name == MOVED_LAST, path.name))
    (folder / MOVED_LAST).unlink(missing_ok=True)
    for old in folder.iterdir():
        if WEIGHTS.fullmatch(old.name):
            old.unlink()
    for path in new:
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.rename(target)
    sync(folder)
