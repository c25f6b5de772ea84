"""The plots of the report: which metrics are plotted, under which titles, and the points of their curves."""

from __future__ import annotations

import math
from typing import Any

from report_inputs import Run

PHASES = ("train", "eval")

# metric: (title, unit). The order is the order of the plots; other metrics are plotted after these.
LEARNING = {
    "judge": ("Judge", "mean score, not trained on"),
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
    "rollout_logprob_mismatch_mean": ("Rollout against training", "mean |Δ log-prob|"),
    "rollout_logprob_mismatch_max": ("Rollout against training, worst token", "max |Δ log-prob|"),
    "rollout_ratio": ("Ratio of training to rollout", "mean over tokens"),
    "updates_without_signal": ("Updates without a gradient", "per iteration"),
}
FORMER_NAMES = {  # of metrics, in the metrics.jsonl of earlier versions
    "rollout_gap": "rollout_logprob_mismatch_mean",
    "rollout_gap_mean": "rollout_logprob_mismatch_mean",
    "rollout_gap_max": "rollout_logprob_mismatch_max",
}
RUNNING = {
    "tokens_per_second": ("Throughput", "tokens per second"),
    "update_tokens_per_second": ("Throughput of updates", "tokens per second"),
    "mfu": ("Model FLOP utilisation", "share of the peak"),
    "padding": ("Padding", "share of computed tokens"),
    "seconds_rollout": ("Rollout", "seconds"),
    "seconds_scoring": ("Scoring", "seconds"),
    "seconds_update": ("Update", "seconds"),
}
# Not plotted; those from tokens on are sizes, not results.
NOT_METRICS = {"step", "time", "phase", "tokens", "pairs", "rows", "sequences", "responses", "updates"}


def number_of(value: Any) -> float | None:
    """The value as a float if it is a finite number (and not a bool), else None."""
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
            curve_phase = "eval" if key.startswith("eval_") else phase
            metric = key.removeprefix("eval_")
            points = curves.setdefault(FORMER_NAMES.get(metric, metric), {}).setdefault(curve_phase, [])
            points.append([step, number_of(row.get("time")), value])
    return curves


def panels_of(runs: list[Run]) -> list[dict]:
    """One panel per metric, with a line for each run and phase, in catalogue order."""
    curves = [(run, curves_of(run)) for run in runs]
    logged = {metric for _, run_curves in curves for metric in run_curves}
    catalogue = LEARNING | RUNNING
    order = [metric for metric in LEARNING if metric in logged]
    order += sorted(logged - catalogue.keys()) + [metric for metric in RUNNING if metric in logged]
    panels = []
    for metric in order:
        title, unit = catalogue.get(metric, (metric.replace("_", " ").capitalize(), ""))
        lines = [
            {"run": index, "label": run.folder.name, "phase": phase, "points": run_curves[metric][phase]}
            for index, (run, run_curves) in enumerate(curves)
            for phase in PHASES
            if phase in run_curves.get(metric, {})
        ]
        panels.append({"metric": metric, "title": title, "unit": unit, "lines": lines})
    return panels
