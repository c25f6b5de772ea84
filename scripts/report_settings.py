"""The settings of runs on the report: those that differ between the runs of a section, and all of each run."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from report_inputs import Run

# They differ between any two runs and say nothing about the training.
NOT_COMPARED = {"name", "started", "arguments.output_dir", "arguments.local_rank", "arguments.data_output_path",
                "arguments.tensorboard_path"}  # fmt: skip


def flat(tree: dict, prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted name, text) pairs."""
    rows: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            rows += flat(value, f"{name}.")
        else:
            rows.append((name, value if isinstance(value, str) else json.dumps(value)))
    return rows


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str | None]]]:
    """(name, value in each run) of the settings that are not equal in all runs; None where a run has none."""
    settings = [dict(flat(run.info)) for run in runs]
    names = dict.fromkeys(name for of_run in settings for name in of_run if name not in NOT_COMPARED)
    rows = [(name, [of_run.get(name) for of_run in settings]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def differing_settings_table(runs: Sequence[Run]) -> str:
    """The table of `differing_settings`; empty for one run."""
    if len(runs) < 2:
        return ""
    rows = "".join(
        f"<tr><th>{html.escape(name.removeprefix('arguments.'))}</th>"
        + "".join(f"<td>{'—' if value is None else html.escape(value)}</td>" for value in values) + "</tr>"
        for name, values in differing_settings(runs)
    )  # fmt: skip
    if not rows:
        return '<p class="hint">All settings of these runs are equal.</p>'
    heads = "".join(f"<th>{html.escape(run.label)}</th>" for run in runs)
    table = f'<table class="settings"><thead><tr><th>setting</th>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<h3>Differing settings</h3><div class="scroll">{table}</div>'


def settings_table(run: Run) -> str:
    """All settings of a run, folded."""
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in flat(run.info)
    )
    if not rows:
        return ""
    table = f'<table class="settings">{rows}</table>'
    return f'<details><summary>Settings · {html.escape(run.label)}</summary><div class="scroll">{table}</div></details>'
