"""Inputs of a run that its own output would overwrite or be mixed with; found before anything is written."""

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


def output_among_data(output_dir: str, data: Sequence[str]) -> list[str]:
    """A line for each folder of data that the output lies in: a later start would read metrics and samples as rows.

    Args:
        data: paths of --data_path and --eval_data_path; those that are no folders of loose files do not matter.
    """
    output, problems = _real(output_dir), []
    for path in data:
        folder = _real(path)
        loose = folder.is_dir() and not any((folder / name).exists() for name in ("dataset_dict.json", "state.json"))
        if not loose or folder not in (output, *output.parents):
            continue
        if any(part.startswith((".", "_")) for part in output.relative_to(folder).parts):
            continue  # hidden: not read
        problems.append(
            f"--output_dir {output_dir}: lies in the data folder {path}, whose files are all read as rows: name a "
            "folder outside of it"
        )
    return problems


def _real(path: str | Path) -> Path:
    return Path(path).expanduser().resolve()
