"""Generate a self-contained HTML report from the output folders of one or several runs.

    python scripts/report.py OUTPUT_DIR [OUTPUT_DIR ...] [-o report.html] [--watch [SECONDS]]

Each folder has `run.json`, `metrics.jsonl` and `samples.jsonl`; missing or truncated files are listed on the page.
Runs of the same kind (same `name` in run.json) share their plots, so that seeds and settings can be compared. The page
is written beside the runs: into the folder of a single run, else into the folder that all of them are in.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from report_curves import curves_of, panels_of
from report_inputs import Run, read_runs
from report_samples import before_and_after_table, over_time, usable_samples
from report_settings import differing_settings_table, settings_table
from report_summary import kind_title, summary_card, summary_samples

from dschat.arguments.script_inputs import exit_on_mistake, new_file, number_type

FILES = Path(__file__).with_name("report_page")
SCRIPTS = ("uplot/uPlot.iife.min.js", "plot.js", "panels.js", "samples.js", "page.js")
STYLES = ("uplot/uPlot.min.css", "style.css")
RUN_FILES = ("run.json", "metrics.jsonl", "samples.jsonl")
NOTHING = "nothing to report: name the --output_dir of a run, the folder of metrics.jsonl"


def section_data(runs: list[Run], *, samples: int) -> dict[str, Any]:
    """What the scripts of the page draw in a section: runs, axes of each run and phase, panels, samples."""
    curves = [curves_of(run) for run in runs]
    return {
        "runs": [run.label for run in runs],
        "axes": [
            {phase: {"step": part.step, "seconds": part.seconds} for phase, part in by_phase.items()}
            for by_phase in curves
        ],
        "panels": panels_of(runs, curves),
        "samples": [over_time(usable_samples(run), per_step=samples) for run in runs],
    }


def section(name: str, runs: list[Run], *, index: int, samples: int) -> str:
    """The HTML of the runs of one kind; the scripts fill in plots and samples."""
    notes = "".join(f"<li>{html.escape(run.label)}: {html.escape(note)}</li>" for run in runs for note in run.notes)
    parts = [
        f'<section id="section-{index}"><h2>{html.escape(kind_title(name))}</h2>',
        f'<ul class="notes">{notes}</ul>' if notes else "",
        differing_settings_table(runs),
        f'<div class="plots" data-section="{index}"></div>',
        f'<div class="sample-list" data-section="{index}"></div>',
        *[before_and_after_table(run, limit=samples) for run in runs],
        *[settings_table(run) for run in runs],
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def page(runs: list[Run], *, samples: int = 24, refresh: float | None = None) -> str:
    """The whole HTML page; text of samples and settings is escaped, the numbers are embedded as JSON.

    Args:
        samples: prompts in each before/after table, and samples of each step in the list.
        refresh: seconds after which the page loads itself again; None: never.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    cards = "\n".join(summary_card(run, runs, curves_of(run)) for run in runs)
    examples = "\n".join(summary_samples(run) for run in runs)
    sections = [section(name, group, index=i, samples=samples) for i, (name, group) in enumerate(groups.items())]
    data = {"sections": [section_data(group, samples=samples) for group in groups.values()], "refresh": refresh}
    template = (FILES / "template.html").read_text(encoding="utf-8")
    licence = (FILES / "uplot" / "LICENSE").read_text(encoding="utf-8")
    script = "\n".join([f"/* uPlot:\n{licence}*/", *[(FILES / name).read_text(encoding="utf-8") for name in SCRIPTS]])
    parts = {
        "TITLE": html.escape(" → ".join(map(kind_title, groups))),
        "STYLE": "\n".join((FILES / name).read_text(encoding="utf-8") for name in STYLES),
        "SCRIPT": script,
        # Nothing else on the page may run or be loaded, even if a text of a run became markup.
        "POLICY": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest(script)}'",
        # Escape "<" inside the script element: a label "</script>" would end it.
        "DATA": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "BODY": "\n".join([f'<div class="summary">{cards}</div>', examples, *sections]),
    }
    # One pass, so that "{{DATA}}" inside a prompt is not replaced.
    return re.sub(r"\{\{(TITLE|POLICY|STYLE|SCRIPT|DATA|BODY)\}\}", lambda match: parts[match[1]], template)


def digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def default_output(folders: list[Path]) -> Path:
    """report.html in the folder of a single run, else in the one that all runs are in; ValueError without one."""
    resolved = {folder.resolve() for folder in folders}
    try:
        common = Path(os.path.commonpath(resolved))
    except ValueError as error:  # on different drives
        raise ValueError(f"the runs have no folder in common ({error}): name the page with -o") from error
    if common == Path(common.anchor):
        raise ValueError(f"the runs have only {common} in common: name the page with -o")
    return common / "report.html"


def write_report(folders: list[Path], output: Path, *, samples: int, refresh: float | None = None) -> bool:
    """Write the page for these runs and print what is missing; returns False if no run has any data."""
    runs = read_runs(folders)
    for run in runs:
        for note in run.notes if refresh is None else ():  # files of a run that has just begun are missing
            print(f"{run.folder}: {note}")
    if not any(run.metrics or run.samples for run in runs):
        return False
    content = page(runs, samples=samples, refresh=refresh)
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # A lone surrogate in a sample cannot be encoded as UTF-8.
        temporary.write_text(content, encoding="utf-8", errors="backslashreplace")
        temporary.replace(output)  # a page that loads itself again never gets half of it
    except OSError as error:  # on a full disk the error has no file name
        raise ValueError(f"--output {output}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    print(f"wrote {output}", flush=True)
    return True


def watch(folders: list[Path], output: Path, *, samples: int, seconds: float) -> int:
    """Write the page whenever files of the runs have changed, until Ctrl-C or SIGTERM; the last one never refreshes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    written = None
    try:
        while True:
            current = file_states(folders)
            if current != written:
                if not write_report(folders, output, samples=samples, refresh=seconds):
                    print(f"waiting for metrics in {', '.join(map(str, folders))} (Ctrl-C ends)", flush=True)
                written = current
            time.sleep(seconds)
    except KeyboardInterrupt:
        return 0 if write_report(folders, output, samples=samples) else 2


def file_states(folders: list[Path]) -> list[tuple[int, int] | None]:
    """Size and time of change of every file of the runs; None where it is missing."""
    states: list[tuple[int, int] | None] = []
    for path in (folder / name for folder in folders for name in RUN_FILES):
        try:
            status = path.stat()
            states.append((status.st_size, status.st_mtime_ns))
        except OSError:
            states.append(None)
    return states


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    parser.add_argument("-o", "--output", type=new_file, help="page to write (default: report.html beside the runs)")
    parser.add_argument("--samples", type=number_type(int, at_least=0), default=24,
                        help="prompts in each before/after table, samples of each step in the list")  # fmt: skip
    parser.add_argument("--watch", type=number_type(float, at_least=1), nargs="?", const=30.0, metavar="SECONDS",
                        help="write the page again whenever files of the runs have changed, until Ctrl-C; the page in "
                             "the browser refreshes itself (default interval: 30)")  # fmt: skip
    options = parser.parse_args(arguments)
    with exit_on_mistake("report"):
        output = options.output or default_output(options.runs)
        if options.watch is not None:
            return watch(options.runs, output, samples=options.samples, seconds=options.watch)
        if write_report(options.runs, output, samples=options.samples):
            return 0
        print(NOTHING)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
