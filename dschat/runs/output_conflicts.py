"""Models that a run reads and would overwrite with what it writes; found before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

WRITTEN = ("", "critic", "actor_ema", "best")  # folders of OUTPUT_DIR that a run exports models into
OWNED = ("checkpoints",)  # whose content it removes as it goes on


def overwritten_models(output_dir: str, models: Sequence[tuple[str, str | None]]) -> list[str]:
    """A line for each model folder that the run would overwrite, links followed.

    Args:
        models: flags and what they name; hub names and None are no folders of this machine.
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
