"""What a killed process leaves half written in an output folder; the next start removes it."""

from __future__ import annotations

import shutil
from pathlib import Path

from dschat.models.unfinished_folder import NAME as UNFINISHED_EXPORT

EXPORTS = ("", "critic", "actor_ema")


def remove_leftovers(output_dir: str | Path) -> None:
    """Remove half-written checkpoints, exports and records; what was about to be replaced comes back.

    Only the one run that holds the folder may call it. Raises: OSError if something cannot be brought back.
    """
    output = Path(output_dir)
    checkpoints = output / "checkpoints"
    for replaced in checkpoints.glob(".step-*.old"):  # killed before another checkpoint took its name
        put_back(replaced.with_name(replaced.name.removeprefix(".").removesuffix(".old")), replaced)
    put_back(output / "best", output / "best.replaced")
    folders = [*checkpoints.glob(".step-*"), output / "best.unfinished", output / "best.replaced"]
    folders += [output / name / UNFINISHED_EXPORT for name in EXPORTS]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for file in [*checkpoints.glob(".*.tmp"), *output.glob(".*.tmp")]:
        if file.is_file():
            file.unlink(missing_ok=True)
    for name in EXPORTS[1:]:
        folder = output / name
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def put_back(folder: Path, replaced: Path) -> None:
    """Give a folder its name back if nothing has taken it."""
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)
