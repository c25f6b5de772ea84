"""Remove incomplete files of killed processes from an output folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from dschat.models.unfinished_folder import STAGING as UNFINISHED_EXPORT

EXPORTS = ("", "critic", "actor_ema")


def remove_leftovers(output_dir: str | Path) -> None:
    """Remove half-written checkpoints, exports and logs; restore folders whose replacement was interrupted.

    Only the run that holds the folder's lock may call it. Raises: OSError if a folder cannot be restored.
    """
    output = Path(output_dir)
    checkpoints = output / "checkpoints"
    for replaced in checkpoints.glob(".step-*.old"):  # killed between the two renames of a replacement
        restore_replaced(replaced.with_name(replaced.name.removeprefix(".").removesuffix(".old")), replaced)
    restore_replaced(output / "best", output / "best.replaced")
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


def restore_replaced(folder: Path, replaced: Path) -> None:
    """Rename `replaced` back to `folder`, unless that exists."""
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)
