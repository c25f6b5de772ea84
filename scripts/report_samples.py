"""Samples of a run on the report: before and after, best and worst, and a selection over time."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from report_inputs import Run, number_of

SHOWN_SCORES = ("score", "judge", "kl")
MAX_STEPS = 40  # steps of each phase in the selection over time
MAX_CHARACTERS = 2400  # of a text in the selection; of longer ones start and end are kept


def usable_samples(run: Run) -> list[dict]:
    """The samples that have a prompt and a response."""
    return [s for s in run.samples if isinstance(s.get("prompt"), str) and isinstance(s.get("response"), str)]


def before_and_after(samples: Sequence[dict], *, limit: int) -> list[tuple[dict, dict | None]]:
    """Pairs (first, last) of samples with the same prompt, evaluation samples preferred.

    If a prompt was sampled at one step only, the second member is None; such pairs come last.
    """
    chosen = [s for s in samples if s.get("phase") == "eval"] or samples
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


def last_scored(samples: Sequence[dict]) -> list[dict]:
    """The samples with a score of the last evaluation; of the last training step, if no evaluation has scores."""
    scored = [s for s in samples if number_of(s.get("score")) is not None and number_of(s.get("step")) is not None]
    scored = [s for s in scored if s.get("phase") == "eval"] or scored
    end = max((s["step"] for s in scored), default=None)
    return [s for s in scored if s["step"] == end]


def best_and_worst(samples: Sequence[dict], *, count: int = 3) -> tuple[list[dict], list[dict]]:
    """The samples of `last_scored` with the highest and the lowest scores, best and worst first; none is in both."""
    ranked = sorted(last_scored(samples), key=lambda sample: sample["score"])
    count = min(count, len(ranked) // 2)
    return ranked[::-1][:count], ranked[:count]


def paired_change(samples: Sequence[dict], name: str) -> tuple[float, float, int] | None:
    """Mean change of a score from the first to the last evaluation over the prompts that both have.

    Returns: mean, its standard error, and the number of prompts; None with fewer than two prompts. Prompts with
        several responses count once, with the mean of their scores.
    """
    by_step: dict[float, dict[str, list[float]]] = {}
    for sample in samples:
        step, value = number_of(sample.get("step")), number_of(sample.get(name))
        if sample.get("phase") == "eval" and step is not None and value is not None:
            by_step.setdefault(step, {}).setdefault(sample["prompt"], []).append(value)
    if len(by_step) < 2:
        return None
    first, last = by_step[min(by_step)], by_step[max(by_step)]
    changes = [sum(last[p]) / len(last[p]) - sum(first[p]) / len(first[p]) for p in first if p in last]
    if len(changes) < 2:
        return None
    mean = sum(changes) / len(changes)
    variance = sum((change - mean) ** 2 for change in changes) / (len(changes) - 1)
    return mean, math.sqrt(variance / len(changes)), len(changes)


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spread, with the first and the last."""
    if len(items) <= count:
        return list(items)
    if count < 2:
        return list(items[:count])
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def over_time(samples: Sequence[dict], *, per_step: int) -> list[dict[str, Any]]:
    """A selection for the list of samples: MAX_STEPS steps of each phase, `per_step` samples of each.

    Of an evaluation the samples of its first prompts, which are the same in every evaluation; of a training step
    samples spread evenly over the scores. Long texts are abridged.
    """
    steps: dict[tuple[str, float], list[dict]] = {}
    for sample in samples:
        step = number_of(sample.get("step"))
        if step is not None:
            phase = "eval" if sample.get("phase") == "eval" else "train"
            steps.setdefault((phase, step), []).append(sample)
    selected = []
    for phase in ("eval", "train"):
        for step in evenly(sorted(step for kind, step in steps if kind == phase), MAX_STEPS):
            of_step = steps[phase, step]
            if phase == "train":
                of_step = sorted(of_step, key=lambda sample: number_of(sample.get("score")) or 0.0)
            part = of_step[:per_step] if phase == "eval" else evenly(of_step, per_step)
            selected += [listed_sample(sample, phase, step) for sample in part]
    return selected


def listed_sample(sample: dict, phase: str, step: float) -> dict[str, Any]:
    scores = {name: number_of(sample.get(name)) for name in SHOWN_SCORES}
    sources = sample.get("rewards")
    if isinstance(sources, dict) and len(sources) > 1:
        scores |= {str(name): number_of(value) for name, value in sources.items()}
    numbers = {name: float(f"{value:.5g}") for name, value in scores.items() if value is not None}
    return {
        "step": step, "phase": phase, "prompt": abridged(sample["prompt"]), "response": abridged(sample["response"]),
        "ended": sample.get("ended") is not False, "scores": numbers,
    }  # fmt: skip


def abridged(text: str) -> str:
    """Start and end of a text of more than MAX_CHARACTERS, with the number of characters left out."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"


def sample_numbers(sample: dict) -> str:
    """Step and scores of a sample, escaped."""
    numbers = [f"{name} {value:.2f}" for name in SHOWN_SCORES if (value := number_of(sample.get(name))) is not None]
    cut = ["cut at the limit"] if sample.get("ended") is False else []
    return html.escape(" · ".join([f"step {sample.get('step', '?')}", *numbers, *cut]))


def sample_cell(sample: dict | None) -> str:
    if sample is None:
        return '<td class="none">not sampled again</td>'
    text, numbers = html.escape(abridged(sample["response"])), sample_numbers(sample)
    return f'<td><div class="text">{text}</div><div class="numbers">{numbers}</div></td>'


def before_and_after_table(run: Run, *, limit: int) -> str:
    """The table of `before_and_after`, empty without samples."""
    pairs = before_and_after(usable_samples(run), limit=limit)
    if not pairs:
        return ""
    rows = "".join(
        f'<tr><td><div class="text prompt">{html.escape(abridged(first["prompt"]))}</div></td>'
        f"{sample_cell(first)}{sample_cell(last)}</tr>"
        for first, last in pairs
    )
    return (
        f"<details><summary>Responses before and after · {html.escape(run.label)} · {len(pairs)} prompts</summary>"
        '<div class="scroll"><table class="samples"><thead><tr><th>Prompt</th><th>First</th>'
        f"<th>Last</th></tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def best_and_worst_list(samples: Sequence[dict]) -> str:
    """The best and the worst samples, empty without scores."""
    best, worst = best_and_worst(samples)
    if not best:
        return ""
    columns = []
    for title, part in (("Best", best), ("Worst", worst)):
        items = "".join(
            f'<li><div class="text prompt">{html.escape(abridged(sample["prompt"]))}</div><div class="text">'
            f'{html.escape(abridged(sample["response"]))}</div><div class="numbers">{sample_numbers(sample)}</div></li>'
            for sample in part
        )
        heading = f"<h4>{title} {len(part)} of the last samples, by score</h4>"
        columns.append(f'<div>{heading}<ul class="cards">{items}</ul></div>')
    return "".join(columns)
