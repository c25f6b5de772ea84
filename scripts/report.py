"""Generate a self-contained HTML report from the output folders of one or several runs.

    python scripts/report.py OUTPUT_DIR [OUTPUT_DIR ...] [-o report.html]

Each folder has `run.json`, `metrics.jsonl` and `samples.jsonl`; missing or truncated files are listed on the page.
Runs of the same kind (same `name` in run.json) share their plots, so that seeds and settings can be compared.
"""

from __future__ import annotations

import argparse
import html
import json
import re
from pathlib import Path

from report_curves import number_of, panels_of
from report_inputs import Run, before_and_after, read_run

from dschat.arguments.script_inputs import exit_on_mistake, new_file, number_type

TEMPLATE = Path(__file__).with_name("report_template.html")


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


def sample_cell(sample: dict | None) -> str:
    if sample is None:
        return '<td class="none">not sampled again</td>'
    numbers = [
        f"{name} {value:.2f}" for name in ("score", "judge", "kl") if (value := number_of(sample.get(name))) is not None
    ]
    step = html.escape(str(sample.get("step", "?")))
    small = " · ".join([f"step {step}", *numbers])
    return f'<td><div class="text">{html.escape(sample["response"])}</div><div class="numbers">{small}</div></td>'


def sample_table(run: Run, *, limit: int) -> str:
    pairs = before_and_after(run.samples, limit=limit)
    if not pairs:
        return ""
    rows = "".join(
        f'<tr><td><div class="text prompt">{html.escape(first["prompt"])}</div></td>'
        f"{sample_cell(first)}{sample_cell(last)}</tr>"
        for first, last in pairs
    )
    return (
        f"<h3>Responses before and after · {html.escape(run.folder.name)}</h3>"
        '<div class="scroll"><table class="samples"><thead><tr><th>Prompt</th><th>First</th>'
        f"<th>Last</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def settings_table(run: Run) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in flat(run.info)
    )
    if not rows:
        return ""
    summary = f"Settings · {html.escape(run.folder.name)}"
    return f'<details><summary>{summary}</summary><div class="scroll"><table>{rows}</table></div></details>'


def section(name: str, runs: list[Run], *, index: int, samples: int) -> str:
    notes = "".join(
        f"<li>{html.escape(str(run.folder))}: {html.escape(note)}</li>" for run in runs for note in run.notes
    )
    parts = [
        f'<section id="section-{index}"><h2>{html.escape(name)}</h2>',
        f'<ul class="notes">{notes}</ul>' if notes else "",
        f'<div class="panels" data-section="{index}"></div>',
        *[sample_table(run, limit=samples) for run in runs],
        *[settings_table(run) for run in runs],
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def page(runs: list[Run], *, samples: int = 24) -> str:
    """The whole HTML page; text of samples and settings is escaped, the numbers are embedded as JSON."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    body = "\n".join(
        section(name, group, index=index, samples=samples) for index, (name, group) in enumerate(groups.items())
    )
    data = json.dumps([panels_of(group) for group in groups.values()], allow_nan=False)
    # Escape "<" inside the script element: a label "</script>" would end it.
    embedded = data.replace("<", "\\u003c")
    title = html.escape(" → ".join(groups))
    template = TEMPLATE.read_text(encoding="utf-8")
    parts = {"TITLE": title, "DATA": embedded, "BODY": body}
    # One pass, so that "{{DATA}}" inside a prompt is not replaced.
    return re.sub(r"\{\{(TITLE|DATA|BODY)\}\}", lambda match: parts[match[1]], template)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    parser.add_argument("-o", "--output", type=new_file, default=Path("report.html"), help="page to write")
    parser.add_argument("--samples", type=number_type(int, at_least=0), default=24,
                        help="prompts in each before/after table")  # fmt: skip
    options = parser.parse_args(arguments)
    with exit_on_mistake("report"):
        return write_report(options.runs, options.output, samples=options.samples)


def write_report(folders: list[Path], output: Path, *, samples: int) -> int:
    """Write the page for these runs and print what is missing; returns the exit status."""
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        for note in run.notes:
            print(f"{run.folder}: {note}")
    if not any(run.metrics or run.samples for run in runs):
        print("nothing to report: name the --output_dir of a run, the folder of metrics.jsonl")
        return 2
    output.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate in a sample cannot be encoded as UTF-8.
    try:
        output.write_text(page(runs, samples=samples), encoding="utf-8", errors="backslashreplace")
    except OSError as error:  # on a full disk the error has no file name
        raise ValueError(f"--output {output}: {error.strerror}") from error
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
