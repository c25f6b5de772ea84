"""The summary on top of the report: for each run what was trained from what, the verdict in numbers, and the cost."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from report_curves import Curves, metric_of
from report_inputs import Run, elapsed_seconds, number_of
from report_ranges import RANGES, healthy_range, recent_mean
from report_samples import (
    abridged,
    before_and_after,
    best_and_worst_list,
    paired_change,
    sample_numbers,
    usable_samples,
)

KINDS = {
    "step1_supervised_finetuning": "Supervised fine-tuning",
    "step2_reward_model_finetuning": "Reward model",
    "step2_dpo_finetuning": "Preference training",
    "step3_rlhf_finetuning": "RLHF",
}
HEADLINES = (
    "perplexity", "token_accuracy", "accuracy", "margin", "rewards/accuracies", "rewards/margins", "judge", "score",
    "kl", "entropy", "response_length", "ended_by_eos",
)  # fmt: skip
MODEL_FLAGS = {  # flag: role in the summary
    "model_name_or_path": "from", "actor_model_name_or_path": "from", "critic_model_name_or_path": "critic",
    "ref_model_name_or_path": "reference", "reward_model_name_or_path": "reward model", "reward": "reward",
    "data_path": "data",
}  # fmt: skip
UNKNOWN = "not logged"


def format_number(value: float) -> str:
    """Three significant digits, as on the axes."""
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def kind_title(name: str) -> str:
    """The heading of the runs with this `name` in run.json."""
    return KINDS.get(name, name)


def kind_of_run(run: Run) -> str:
    """What the run did, with its algorithm or loss."""
    kind = kind_title(run.name)
    for flag in ("algorithm", "preference_loss"):
        if isinstance(run.arguments.get(flag), str):
            return f"{kind} · {run.arguments[flag]}"
    return kind


def named_inputs(run: Run, runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """(role, short name, full name) of the models and data that the run started from.

    A folder of another run on the page has that run's label; other paths their last two parts.
    """
    labels = {str(other.folder.resolve()): other.label for other in runs if other is not run}
    labels |= {str(other.arguments.get("output_dir")): other.label for other in runs if other is not run}
    inputs = []
    for flag, role in MODEL_FLAGS.items():
        value = run.arguments.get(flag)
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and name:
                short = "/".join(Path(name).parts[-2:]) if name.startswith(("/", ".", "~")) else name
                inputs.append((role, labels.get(name, short), name))
    return inputs


def verdict(run: Run, curves: dict[str, Curves]) -> list[dict[str, Any]]:
    """First and last value of the headline metrics, from the evaluations if there are two, else from training.

    Each has metric, phase, first, last, better ("better", "worse" or ""), the best step where one direction is the
    aim, and the standard error of the change where samples give one. Values of training are means over a tenth of
    the curve.
    """
    rows = []
    samples = usable_samples(run)
    logged = [name for part in curves.values() for name in part.values]
    answers = sorted({name for name in logged if name.startswith(("mean@", "pass@", "maj@"))})
    for name in (*HEADLINES[:5], *answers, *HEADLINES[5:]):
        points, phase = headline_points(curves, name)
        if not points:
            continue
        values = [value for _, value in points]
        first, last = (values[0], values[-1]) if phase == "eval" else (recent_mean(values[::-1]), recent_mean(values))
        better = metric_of(name).better
        row = {"metric": name, "phase": phase, "first": first, "last": last, "better": "", "best": None, "change": None}
        if better and last != first:
            row["better"] = "better" if (last > first) == (better == "higher") else "worse"
        if better and phase == "eval" and len(values) > 2:
            row["best"] = (max if better == "higher" else min)(points, key=lambda point: point[1])
        if phase == "eval" and name in ("score", "judge"):
            row["change"] = paired_change(samples, name)
        rows.append(row)
    return rows


def headline_points(curves: dict[str, Curves], name: str) -> tuple[list[tuple[float, float]], str]:
    """The points of a metric and their phase: evaluation if it has at least two, else training."""
    for phase, least in (("eval", 2), ("train", 1), ("eval", 1)):
        points = curves[phase].points(name) if phase in curves else []
        if len(points) >= least:
            return points, phase
    return [], ""


def warnings_of(run: Run, curves: dict[str, Curves]) -> list[str]:
    """A line for each metric whose recent mean is outside its healthy range, with what to do."""
    lines = []
    for name in RANGES:
        healthy = healthy_range(name, run)
        points = (curves.get("train") or curves.get("eval") or Curves([], [], {})).points(name)
        if healthy is None or not points:
            continue
        value = recent_mean([value for _, value in points])
        if advice := healthy.violation(value):
            lines.append(f"{metric_of(name).title} ({name}) {format_number(value)}, usual {healthy.text}: {advice}")
    return lines


def cost(run: Run, curves: dict[str, Curves]) -> list[tuple[str, str]]:
    """Duration, steps, tokens, peak memory and devices; UNKNOWN where the files do not have them."""
    seconds = [value for value in elapsed_seconds(run.metrics) if value is not None]
    steps = [step for step in (number_of(row.get("step")) for row in run.metrics) if step is not None]
    memory = [value for part in curves.values() for _, value in part.points("peak_memory_gib")]
    devices = run.info.get("devices")
    devices = devices if isinstance(devices, dict) else {}
    processes, device = devices.get("processes"), devices.get("name") or devices.get("accelerator")
    started = run.info.get("started")
    return [
        ("Duration", format_seconds(max(seconds)) if seconds else UNKNOWN),
        ("Steps", f"{max(steps):,.0f}" if steps else UNKNOWN),
        tokens_of(run),
        ("Peak memory", f"{max(memory):.2f} GiB, main process" if memory else UNKNOWN),
        ("Devices", f"{processes if processes is not None else '?'} × {device}" if device else UNKNOWN),
        ("Started", started if isinstance(started, str) else UNKNOWN),
    ]


def tokens_of(run: Run) -> tuple[str, str]:
    """Response tokens of all rollouts where they are logged; else the mean throughput of the updates."""
    rollouts, rates = 0.0, []
    for row in run.metrics:
        if row.get("phase") == "train":
            length, responses = number_of(row.get("response_length")), number_of(row.get("responses"))
            rollouts += (length or 0.0) * (responses or 0.0)
            rates.append(number_of(row.get("tokens_per_second")))
    if rollouts:
        return "Tokens sampled", f"{rollouts:,.0f}"
    known = [rate for rate in rates if rate]
    # Harmonic mean: steps of about equal size weigh by their time.
    return "Throughput", f"{len(known) / sum(1 / r for r in known):,.0f} tokens/s" if known else UNKNOWN


def verdict_list(rows: Iterable[dict[str, Any]]) -> str:
    items = []
    for row in rows:
        parts = [f"{format_number(row['first'])} → {format_number(row['last'])}"]
        if row["change"] is not None:
            mean, error, prompts = row["change"]
            parts.append(f"change {mean:+.3g}, standard error {error:.2g} over {prompts} prompts")
        if row["best"] is not None and not math.isclose(row["best"][1], row["last"]):
            parts.append(f"best {format_number(row['best'][1])} at step {row['best'][0]:g}")
        phase = "evaluation" if row["phase"] == "eval" else "training, tenth of the steps"
        numbers = f'<b class="{row["better"] or "neutral"}">{parts[0]}</b>'
        small = html.escape(" · ".join([*parts[1:], phase]))
        title = html.escape(metric_of(row["metric"]).title)
        items.append(f"<li><span>{title}</span> {numbers} <small>{small}</small></li>")
    return f'<ul class="verdict">{"".join(items)}</ul>' if items else "<p>No results logged yet.</p>"


def example_of(samples: Sequence[dict]) -> str:
    """One prompt with its first and last response."""
    pairs = [pair for pair in before_and_after(samples, limit=1) if pair[1] is not None]
    if not pairs:
        return ""
    first, last = pairs[0]
    items = "".join(
        f'<li><div class="text">{html.escape(abridged(sample["response"]))}</div>'
        f'<div class="numbers">{title} · {sample_numbers(sample)}</div></li>'
        for title, sample in (("before", first), ("after", last))
    )
    prompt = html.escape(abridged(first["prompt"]))
    return f'<div><h4>Before and after</h4><div class="text prompt">{prompt}</div><ul class="cards">{items}</ul></div>'


def summary_card(run: Run, runs: Sequence[Run], curves: dict[str, Curves]) -> str:
    """The card of a run in the summary, as HTML."""
    inputs = "".join(
        f'<li><span>{html.escape(role)}</span> <code title="{html.escape(full)}">{html.escape(short)}</code></li>'
        for role, short, full in named_inputs(run, runs)
    )
    alarms = "".join(f"<li>{html.escape(line)}</li>" for line in warnings_of(run, curves))
    costs = "".join(f"<div><dt>{name}</dt><dd>{html.escape(text)}</dd></div>" for name, text in cost(run, curves))
    return "".join([
        f'<article class="run"><h3>{html.escape(run.label)} <small>{html.escape(kind_of_run(run))}</small></h3>',
        f'<ul class="inputs">{inputs}</ul>' if inputs else "", verdict_list(verdict(run, curves)),
        f'<ul class="alarms">{alarms}</ul>' if alarms else "", f'<dl class="cost">{costs}</dl></article>',
    ])  # fmt: skip


def summary_samples(run: Run) -> str:
    """A response before and after, and the best and the worst of the last samples; empty without samples."""
    samples = usable_samples(run)
    columns = example_of(samples) + best_and_worst_list(samples)
    title = f"<summary>Samples of {html.escape(run.label)}</summary>"
    return f'<details open>{title}<div class="columns">{columns}</div></details>' if columns else ""
