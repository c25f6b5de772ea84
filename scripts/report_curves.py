"""The plots of the report: which metrics are plotted, in which group and on which axis, and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from report_inputs import Run, elapsed_seconds, number_of
from report_ranges import healthy_range, recent_mean

PHASES = ("train", "eval")
DIGITS = 7  # significant digits of embedded values: those of float32
DECADES = 30.0  # largest ÷ smallest value from which an axis is logarithmic
FLAT = 1e-6  # relative spread below which a curve is a constant


@dataclass(frozen=True)
class Metric:
    """How a metric is plotted.

    Attributes:
        better: "higher" or "lower" where one of them is the aim.
        magnitude: a quantity that is positive by definition and compared by its ratio; may get a logarithmic axis.
        schedule: set by flags and not measured; never smoothed.
    """

    title: str
    unit: str = ""
    better: str = ""
    magnitude: bool = False
    schedule: bool = False


# The order is the order of the plots; metrics that are not listed follow those of their group.
RESULTS = {
    "judge": Metric("Judge", "mean score, not trained on", "higher"),
    "score": Metric("Score", "mean per response", "higher"),
    "reward": Metric("Reward", "mean per response, penalties included", "higher"),
    "loss": Metric("Loss", "mean over the step", "lower", magnitude=True),
    "perplexity": Metric("Perplexity", "per token", "lower", magnitude=True),
    "token_accuracy": Metric("Token accuracy", "share of trained tokens", "higher"),
    "accuracy": Metric("Accuracy", "share of pairs", "higher"),
    "margin": Metric("Margin", "chosen − rejected", "higher"),
    "rewards/accuracies": Metric("Accuracy", "share of pairs", "higher"),
    "rewards/margins": Metric("Margin", "chosen − rejected", "higher"),
    "kl": Metric("KL to the reference", "nats per response"),
    "entropy": Metric("Entropy", "nats per token"),
    "response_length": Metric("Response length", "tokens"),
    "ended_by_eos": Metric("Ended by EOS", "share of responses"),
    "flat_groups": Metric("Groups of equal scores", "share"),
    "chosen_score": Metric("Score of chosen responses", "mean"),
    "rejected_score": Metric("Score of rejected responses", "mean"),
    "rewards/chosen": Metric("Implicit reward of chosen responses", "mean of β·Δ"),
    "rewards/rejected": Metric("Implicit reward of rejected responses", "mean of β·Δ"),
    "logps/chosen": Metric("Log-prob of chosen responses", "nats"),
    "logps/rejected": Metric("Log-prob of rejected responses", "nats"),
    "scored": Metric("With a score", "share of responses"),
    "trained": Metric("Trained on", "share of responses"),
}
UPDATES = {
    "clip_fraction": Metric("Clipped ratios", "share of tokens"),
    "approx_kl": Metric("KL of the update", "nats per token", magnitude=True),
    "ratio": Metric("Ratio of the update", "mean π / π_old"),
    "policy_loss": Metric("Policy loss", "mean per token"),
    "kl_coef": Metric("KL coefficient", schedule=True),
    "kl_loss": Metric("KL loss", "nats per token"),
    "explained_variance": Metric("Explained variance of the critic", "1 is perfect", "higher"),
    "value_loss": Metric("Value loss", "mean per token", "lower", magnitude=True),
    "value_mean": Metric("Value", "mean per token"),
    "return_mean": Metric("Return", "mean per token"),
    "value_clip_fraction": Metric("Clipped values", "share of tokens"),
    "value_error": Metric("Error of the values", "mean square per token", magnitude=True),
    "return_square": Metric("Squared return", "mean per token", magnitude=True),
    "grad_norm": Metric("Gradient norm", "before clipping", magnitude=True),
    "actor_grad_norm": Metric("Gradient norm of the actor", "before clipping", magnitude=True),
    "critic_grad_norm": Metric("Gradient norm of the critic", "before clipping", magnitude=True),
    "learning_rate": Metric("Learning rate", schedule=True),
    "actor_learning_rate": Metric("Learning rate of the actor", schedule=True),
    "critic_learning_rate": Metric("Learning rate of the critic", schedule=True),
    "rollout_logprob_mismatch_mean": Metric("Rollout against training", "mean |Δ log-prob|", magnitude=True),
    "rollout_logprob_mismatch_max": Metric("Rollout against training, worst token", "max |Δ log-prob|", magnitude=True),
    "rollout_ratio": Metric("Ratio of training to rollout", "mean over tokens"),
    "skipped_updates": Metric("Skipped updates", "per line"),
    "updates_without_signal": Metric("Updates without a gradient", "per iteration"),
}
SPEED = {
    "tokens_per_second": Metric("Throughput", "tokens per second", "higher"),
    "samples_per_second": Metric("Throughput", "sequences per second", "higher"),
    "update_tokens_per_second": Metric("Throughput of updates", "tokens per second", "higher"),
    "update_samples_per_second": Metric("Throughput of updates", "sequences per second", "higher"),
    "sequence_length": Metric("Sequence length", "tokens, mean of the step"),
    "mfu": Metric("Model FLOP utilisation", "share of the peak", "higher"),
    "padding": Metric("Padding", "share of computed tokens", "lower"),
    "seconds_rollout": Metric("Rollout", "seconds"),
    "seconds_scoring": Metric("Scoring", "seconds"),
    "seconds_update": Metric("Update", "seconds"),
    "memory_gib": Metric("Memory in use", "GiB", "lower"),
    "peak_memory_gib": Metric("Peak memory", "GiB", "lower"),
}
GROUPS = {"Results": RESULTS, "Updates": UPDATES, "Speed and memory": SPEED}
CATALOGUE = RESULTS | UPDATES | SPEED
FORMER_NAMES = {  # of metrics, in the metrics.jsonl of earlier versions
    "rejected_logprob": "logps/rejected",
    "chosen_logprob": "logps/chosen",
    "rejected_reward": "rewards/rejected",
    "chosen_reward": "rewards/chosen",
    "rollout_gap": "rollout_logprob_mismatch_mean",
    "rollout_gap_mean": "rollout_logprob_mismatch_mean",
    "rollout_gap_max": "rollout_logprob_mismatch_max",
}
# Not plotted; those from tokens on are sizes, not results.
NOT_METRICS = {"step", "time", "epoch", "phase", "tokens", "pairs", "rows", "sequences", "responses", "updates"}


def metric_of(name: str) -> Metric:
    """The catalogue's entry; for other metrics a title made of the name."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    source = name.removeprefix("reward_")
    if source != name and not name.endswith("_missing"):
        return Metric(f"Score by {source}", "mean per response, before its weight", "higher")
    return Metric(
        name.replace("_", " ").capitalize(), better="higher" if name.startswith(("mean@", "pass@", "maj@")) else "",
        magnitude=name.endswith("grad_norm"), schedule=name.endswith("learning_rate"),
    )  # fmt: skip


def group_of(name: str) -> str:
    """Scores of single sources and answers are results, times are speed; what else is not listed is of the updates."""
    for group, metrics in GROUPS.items():
        if name in metrics:
            return group
    if name.startswith("seconds_"):
        return "Speed and memory"
    return "Results" if name.startswith(("reward_", "judge_", "mean@", "pass@", "maj@", "best@")) else "Updates"


@dataclass
class Curves:
    """The metrics of one run and phase: values[metric][i] belongs to step[i] and seconds[i]; None where not logged."""

    step: list[float]
    seconds: list[float | None]
    values: dict[str, list[float | None]]

    def points(self, metric: str) -> list[tuple[float, float]]:
        """(step, value) of the lines that have the metric."""
        values = self.values.get(metric, [])
        return [(step, value) for step, value in zip(self.step, values, strict=False) if value is not None]


def curves_of(run: Run) -> dict[str, Curves]:
    """phase → its curves; `eval_loss` is the curve of `loss` in the phase eval. Lines without a step are left out."""
    curves = {phase: Curves([], [], {}) for phase in PHASES}
    for row, seconds in zip(run.metrics, elapsed_seconds(run.metrics), strict=True):
        step = number_of(row.get("step"))
        if step is None:
            continue
        of_line: dict[str, dict[str, float]] = {}
        for key, raw in row.items():
            value = number_of(raw)
            if key not in NOT_METRICS and value is not None:
                phase = "eval" if row.get("phase") == "eval" or key.startswith("eval_") else "train"
                metric = key.removeprefix("eval_")
                of_line.setdefault(phase, {})[FORMER_NAMES.get(metric, metric)] = float(f"{value:.{DIGITS}g}")
        for phase, values in of_line.items():
            append_line(curves[phase], step, seconds, values)
    return {phase: part for phase, part in curves.items() if part.step}


def append_line(curves: Curves, step: float, seconds: float | None, values: dict[str, float]) -> None:
    for metric in values:
        curves.values.setdefault(metric, [None] * len(curves.step))
    curves.step.append(step)
    curves.seconds.append(None if seconds is None else round(seconds, 3))
    for metric, column in curves.values.items():
        column.append(values.get(metric))


def logarithmic(metric: Metric, values: list[float]) -> bool:
    """Whether the vertical axis is logarithmic: magnitudes that are all positive and span a factor of DECADES.

    So shares, scores, differences and schedules are never drawn on a logarithmic axis unless the reader asks for it.
    """
    return metric.magnitude and bool(values) and min(values) > 0 and max(values) >= DECADES * min(values)


def constant(values: list[float]) -> bool:
    """Whether the values differ by rounding only; a single value is constant too."""
    low, high = min(values), max(values)
    return high - low <= FLAT * max(abs(low), abs(high))


def panels_of(runs: list[Run], curves: list[dict[str, Curves]]) -> list[dict[str, Any]]:
    """One panel per metric, in catalogue order by group, with a line for each run and phase that logged it.

    A line has its run (index in `runs`), phase, and values along the axis of that run and phase. `flat` panels have
    constant lines only, none of them outside the healthy range.
    """
    logged = {metric for by_phase in curves for part in by_phase.values() for metric in part.values}
    order = [metric for metric in CATALOGUE if metric in logged] + sorted(logged - CATALOGUE.keys())
    panels = []
    for group in GROUPS:
        panels += [panel_of(name, group, runs, curves) for name in order if group_of(name) == group]
    return panels


def panel_of(name: str, group: str, runs: list[Run], curves: list[dict[str, Curves]]) -> dict[str, Any]:
    metric = metric_of(name)
    lines = [
        {"run": index, "phase": phase, "values": by_phase[phase].values[name]}
        for index, by_phase in enumerate(curves)
        for phase in PHASES
        if phase in by_phase and name in by_phase[phase].values
    ]
    values = [[value for value in line["values"] if value is not None] for line in lines]
    # The runs of a section are of one kind; a range that holds for some of them only is not drawn.
    ranges = {healthy_range(name, run) for run in runs}
    healthy = ranges.pop() if len(ranges) == 1 else None
    outside = sorted({healthy.violation(recent_mean(part)) for part in values} - {""}) if healthy else []
    return {
        "metric": name, "title": metric.title, "unit": metric.unit, "group": group, "lines": lines,
        "log": logarithmic(metric, [value for part in values for value in part]), "smooth": not metric.schedule,
        "flat": all(constant(part) for part in values) and not outside,
        "range": healthy and {"low": healthy.low, "high": healthy.high, "text": healthy.text, "advice": outside},
    }  # fmt: skip
