"""Generate a self-contained HTML report from the output folders of one or several runs.

    python scripts/report.py OUTPUT_DIR [OUTPUT_DIR ...] [-o report.html]

Each folder holds `run.json`, `metrics.jsonl` and `samples.jsonl`; missing or truncated files are listed on the page.
Runs of the same kind (same `name` in run.json) share their plots, so that seeds and settings can be compared.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat.arguments.script_inputs import exit_on_mistake, new_file, number_type

TEMPLATE = Path(__file__).with_name("report_template.html")
PHASES = ("train", "eval")

# metric: (title, unit). The order is the order of the plots; other metrics are plotted after these.
LEARNING = {
    "judge": ("Judge", "mean score, watched only"),
    "score": ("Score", "mean per response"),
    "reward": ("Reward, KL included", "mean per response"),
    "kl": ("KL to the reference", "nats"),
    "loss": ("Loss", "mean over the step"),
    "perplexity": ("Perplexity", "per token"),
    "accuracy": ("Accuracy", "share"),
    "margin": ("Score margin", "chosen − rejected"),
    "chosen_score": ("Score of chosen responses", "mean"),
    "rejected_score": ("Score of rejected responses", "mean"),
    "flat_groups": ("Groups of equal scores", "share"),
    "entropy": ("Entropy", "nats per token"),
    "response_length": ("Response length", "tokens"),
    "ended_by_eos": ("Ended by EOS", "share of responses"),
    "clip_fraction": ("Clipped ratios", "share of tokens"),
    "approx_kl": ("KL of the update", "nats per token"),
    "explained_variance": ("Explained variance of the critic", "1 is perfect"),
    "policy_loss": ("Policy loss", "mean per token"),
    "value_loss": ("Value loss", "mean per token"),
    "value_mean": ("Value", "mean per token"),
    "return_mean": ("Return", "mean per token"),
    "value_clip_fraction": ("Clipped values", "share of tokens"),
    "value_error": ("Error of the values", "mean square per token"),
    "return_square": ("Squared return", "mean per token"),
    "rollout_gap_mean": ("Rollout against training", "mean |Δ log-prob|"),
    "rollout_gap_max": ("Rollout against training, worst token", "max |Δ log-prob|"),
    "rollout_ratio": ("Ratio of training to rollout", "mean over tokens"),
    "updates_without_signal": ("Updates with nothing to learn from", "per iteration"),
}
RUNNING = {
    "tokens_per_second": ("Throughput", "tokens per second"),
    "seconds_rollout": ("Rollout", "seconds"),
    "seconds_scoring": ("Scoring", "seconds"),
    "seconds_update": ("Update", "seconds"),
}
# Starting with tokens: sizes, not results.
NOT_METRICS = {"step", "time", "phase", "tokens", "pairs", "rows", "sequences", "responses", "updates"}


@dataclass
class Run:
    """The contents of one output folder, as far as they could be read."""

    folder: Path
    info: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict] = field(default_factory=list)
    samples: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.info.get("name") or self.folder.resolve().name)


def read_jsonl(path: Path, notes: list[str]) -> list[dict]:
    """The objects of a jsonl file. Invalid lines are skipped and reported; the last may be incomplete."""
    if not path.is_file():
        notes.append(f"{path.name} is {'a folder' if path.is_dir() else 'missing'}")
        return []
    rows: list[dict] = []
    broken: list[int] = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken.append(place)
    if broken:
        last = " (the last one: cut off)" if broken == [len(lines)] else ""
        notes.append(f"{path.name}: {len(broken)} unreadable line(s), first at line {broken[0]}{last}")
    elif not rows:
        notes.append(f"{path.name} is empty")
    return rows


def read_run(folder: Path) -> Run:
    run = Run(folder)
    if not folder.is_dir():
        run.notes.append("no such folder")
        return run
    try:
        info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if isinstance(info, dict):
            run.info = info
        else:
            run.notes.append("run.json holds no JSON object")
    except FileNotFoundError:
        run.notes.append("run.json is missing")
    except (ValueError, RecursionError) as error:
        run.notes.append(f"run.json is not valid JSON ({error})")
    except OSError as error:
        run.notes.append(f"run.json cannot be read ({error.strerror})")
    run.metrics = read_jsonl(folder / "metrics.jsonl", run.notes)
    samples = folder / "samples.jsonl"
    if samples.exists() or not run.name.startswith(("step1", "step2")):  # these steps write no samples
        run.samples = read_jsonl(samples, run.notes)
    return run


def number_of(value: Any) -> float | None:
    """`value` when it is a finite number, else None (bool is no number here)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for float
        return None


def curves_of(run: Run) -> dict[str, dict[str, list[list[float | None]]]]:
    """metric → phase → points [step, seconds, value]; `eval_loss` is the eval curve of `loss`."""
    curves: dict[str, dict[str, list]] = {}
    for row in run.metrics:
        step = number_of(row.get("step"))
        phase = "eval" if row.get("phase") == "eval" else "train"
        for key, raw in row.items():
            value = number_of(raw)
            if key in NOT_METRICS or value is None or step is None:
                continue
            where = "eval" if key.startswith("eval_") else phase
            points = curves.setdefault(key.removeprefix("eval_"), {}).setdefault(where, [])
            points.append([step, number_of(row.get("time")), value])
    return curves


def panels_of(runs: list[Run]) -> list[dict]:
    """One panel per metric, with a line for each run and phase, in catalogue order."""
    curves = [(run, curves_of(run)) for run in runs]
    found = {metric for _, run_curves in curves for metric in run_curves}
    known = LEARNING | RUNNING
    order = [m for m in LEARNING if m in found] + sorted(found - known.keys()) + [m for m in RUNNING if m in found]
    panels = []
    for metric in order:
        title, unit = known.get(metric, (metric.replace("_", " ").capitalize(), ""))
        lines = [
            {"run": index, "label": run.folder.name, "phase": phase, "points": run_curves[metric][phase]}
            for index, (run, run_curves) in enumerate(curves)
            for phase in PHASES
            if phase in run_curves.get(metric, {})
        ]
        panels.append({"metric": metric, "title": title, "unit": unit, "lines": lines})
    return panels


def before_and_after(samples: list[dict], *, limit: int) -> list[tuple[dict, dict | None]]:
    """Pairs (first, last) of samples with the same prompt, evaluation samples preferred.

    If a prompt was sampled at one step only, the second member is None; such pairs come last.
    """
    usable = [s for s in samples if isinstance(s.get("prompt"), str) and isinstance(s.get("response"), str)]
    chosen = [s for s in usable if s.get("phase") == "eval"] or usable
    first: dict[str, dict] = {}
    last: dict[str, dict] = {}
    for sample in chosen:
        first.setdefault(sample["prompt"], sample)
        if sample.get("step") != first[sample["prompt"]].get("step") and (
            sample["prompt"] not in last or sample.get("step") != last[sample["prompt"]].get("step")
        ):
            last[sample["prompt"]] = sample
    pairs = [(sample, last.get(prompt)) for prompt, sample in first.items()]
    return sorted(pairs, key=lambda pair: pair[1] is None)[:limit]


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
    return re.sub(r"\{\{(TITLE|DATA|BODY)\}\}", lambda found: parts[found[1]], template)


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
        print("nothing to report: give the --output_dir of a run, the folder that holds metrics.jsonl")
        return 2
    output.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate in a sample cannot be encoded as UTF-8.
    try:
        output.write_text(page(runs, samples=samples), encoding="utf-8", errors="backslashreplace")
    except OSError as error:  # a full disk names no file
        raise ValueError(f"--output {output}: {error.strerror}") from error
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
