"""Detect input models that a run would overwrite with its own output, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

WRITTEN = ("", "critic", "actor_ema", "best")  # subfolders of OUTPUT_DIR that a run exports models to
OWNED = ("checkpoints",)  # subfolders whose content a run deletes


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
        into = [_real(output / name) for name in WRITTEN]
        if model in into or any(_real(output / name) in model.parents for name in OWNED):
            problems.append(
                f"--output_dir {output_dir}: this run would overwrite {model}, which {flag} {path} reads: name another "
                "folder for the output"
            )
    return problems


def _real(path: str | Path) -> Path:
    return Path(path).expanduser().resolve()
