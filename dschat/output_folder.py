"""The folder that a run writes into: one run at a time."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from dschat import launch

_held: dict[Path, IO[str]] = {}


def claim(output_dir: str | Path) -> None:
    """Keep other runs out of a folder until this process ends, however it ends. A collective.

    Raises:
        ValueError: another run is writing there.
    """
    problem = None
    if launch.is_main():
        path = Path(output_dir, ".lock").resolve()
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            problem = (
                f"--output_dir {output_dir}: another run is writing there ({file.read().strip() or 'unknown'}): wait "
                "for it, end it, or name another folder"
            )
            file.close()
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            _held[path] = file  # closing it would let go
    problem = launch.from_all_ranks(problem)[0]
    if problem:
        raise ValueError(problem)
