"""Detect input models that a run would overwrite with its own output, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

EXPORT_FOLDERS = ("", "critic", "actor_ema", "best")  # subfolders of OUTPUT_DIR to which a run exports models
DELETED_FOLDERS = ("checkpoints",)  # subfolders whose content a run deletes


def overwritten_models(output_dir: str, models: Sequence[tuple[str, str | None]]) -> list[str]:
    """A line for each model folder that the run would overwrite; symbolic links are resolved.

    Args:
        models: flags and their values; hub names and None are skipped.
    """
    output, problems = _real(output_dir), []
    for flag, path in models:
        if not path or not Path(path).expanduser().is_dir():
            continue
        model = _real(path)
        targets = [_real(output / name) for name in EXPORT_FOLDERS]
        deleted = [_real(output / name) for name in DELETED_FOLDERS]
        if model in targets or any(folder in model.parents for folder in deleted):
            problems.append(
                f"--output_dir {output_dir}: this run would overwrite {model}, the input of {flag} {path}: name "
                "another folder"
            )
    return problems


def _real(path: str | Path) -> Path:
    return Path(path).expanduser().resolve()
