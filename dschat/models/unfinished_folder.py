"""Files that take their places in a folder together: a folder that is cut off in between never looks complete."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dschat.checkpoints.verified_folder import sync

NAME = ".unfinished"  # where files lie until all of them are written
LAST = "config.json"  # without it nobody takes a folder for a model
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


@contextmanager
def unfinished_folder(folder: Path) -> Iterator[Path]:
    """An empty folder inside of `folder`, which is made if missing; its files move up when the block ends.

    They are on the disk by then. Files of the same names are replaced, weights of another model that was here are
    removed. If the block raises, `folder` is as it was and the files are gone; one that was made for them, too.

    Raises: OSError if the files cannot be written.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / NAME
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in [temporary, *temporary.rglob("*")]:
            sync(path)
        _move_up(temporary, folder)
        temporary.rmdir()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if made and not any(folder.iterdir()):
            folder.rmdir()


def _move_up(temporary: Path, folder: Path) -> None:
    new = sorted(temporary.iterdir(), key=lambda path: (path.name == LAST, path.name))
    (folder / LAST).unlink(missing_ok=True)
    for old in folder.iterdir():
        if WEIGHTS.fullmatch(old.name):
            old.unlink()
    for path in new:
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.rename(target)
    sync(folder)
