"""Move the files of an earlier run aside when a new run starts in its output folder, and restore them on resume.

output_dir/checkpoints-before-1/     its checkpoints, metrics.jsonl, samples.jsonl, run.json and best model
output_dir/history-before-2/         for a run without checkpoints: metrics.jsonl, samples.jsonl and run.json
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

STEP_FOLDER = re.compile(r"step-\d{8}(-update-\d{4})?")
RECORDS = ("metrics.jsonl", "samples.jsonl", "run.json")
WITH_CHECKPOINTS, WITHOUT_CHECKPOINTS = "checkpoints-before-", "history-before-"


def step_folders(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if STEP_FOLDER.fullmatch(path.name))


def move_aside(output_dir: str | Path) -> Path | None:
    """Move checkpoints and logs of an earlier run to a new subfolder, which is returned; None if there are none.

    Raises: OSError if they cannot be moved.
    """
    output = Path(output_dir)
    checkpoints = output / "checkpoints"
    saved = bool(step_folders(checkpoints))
    if not saved and not _has_trained(output / "metrics.jsonl"):
        return None
    number = 1
    while any((output / f"{name}{number}").exists() for name in (WITH_CHECKPOINTS, WITHOUT_CHECKPOINTS)):
        number += 1
    aside = output / f"{WITH_CHECKPOINTS if saved else WITHOUT_CHECKPOINTS}{number}"
    if saved:
        checkpoints.rename(aside)
    else:
        aside.mkdir()
    for name in (*RECORDS, "best") if saved else RECORDS:  # best is only kept with checkpoints to resume from
        if (output / name).exists():
            (output / name).rename(aside / name)
    return aside


def restore_records(output_dir: str | Path, checkpoint: Path) -> None:
    """If a checkpoint to resume from was set aside, copy its logs back, after setting the current ones aside.

    Raises: OSError if they cannot be moved or copied.
    """
    output, aside = Path(output_dir), checkpoint.parent
    if aside.parent.resolve() != output.resolve() or not aside.name.startswith(WITH_CHECKPOINTS):
        return
    move_aside(output)
    for name in RECORDS:
        if (aside / name).exists():
            shutil.copy2(aside / name, output / name)
    if (aside / "best").exists():
        shutil.copytree(aside / "best", output / "best", dirs_exist_ok=True)


def newest_moved_aside(output_dir: str | Path) -> Path | None:
    """The newest checkpoint of the run that was set aside last."""
    asides = [path for path in Path(output_dir).glob(f"{WITH_CHECKPOINTS}*") if step_folders(path)]
    numbered = [(int(path.name.removeprefix(WITH_CHECKPOINTS)), path) for path in asides if path.name[-1].isdigit()]
    return step_folders(max(numbered)[1])[-1] if numbered else None


def _has_trained(metrics: Path) -> bool:
    """Whether metrics.jsonl has a finished step; evaluations before the first step are not worth keeping."""
    try:
        lines = metrics.read_bytes().split(b"\n")
    except OSError:
        return False
    for line in lines:
        try:
            if json.loads(line)["step"] > 0:
                return True
        except (ValueError, KeyError, TypeError):
            continue
    return False
