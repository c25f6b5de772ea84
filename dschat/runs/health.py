"""Detect skipped updates (non-finite loss or gradient) and outliers in the training metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dschat.arguments import RunArguments
from dschat.checkpoints.selection import newest_checkpoint
from dschat.runs.run_log import RunLog

METRICS_WITH_OUTLIER_WARNING = ("loss", "kl", "policy_loss", "value_loss")
MIN_SAMPLES = 20  # samples needed before the standard deviation is used


class TooManyBadSteps(SystemExit):
    """Too many updates in a row were skipped; the reason has been logged."""

    def __init__(self) -> None:
        super().__init__(1)


class Health:
    """Checks the metrics of every step. Ranks agree, since the metrics are equal on all of them.

    Attributes:
        skipped_in_a_row: number of consecutive skipped updates, up to the newest.
        ends_early: True once the KL divergence has reached --stop_at_kl.
    """

    def __init__(
        self, run: RunArguments, log: RunLog, state: Mapping[str, Any] | None = None, *, stop_at_kl: float = 0.0
    ) -> None:
        """Restore the state of a checkpoint, if given."""
        self.run, self.log, self.stop_at_kl = run, log, stop_at_kl
        self.skipped_in_a_row = state["skipped_in_a_row"] if state else 0
        self.moments: dict[str, list[float]] = dict(state["moments"]) if state else {}
        self.ends_early = False

    @property
    def state(self) -> dict[str, Any]:
        """JSON state for a checkpoint."""
        return {"skipped_in_a_row": self.skipped_in_a_row, "moments": {k: list(v) for k, v in self.moments.items()}}

    def check_metrics(self, step: int, metrics: Mapping[str, float], *, skipped: Sequence[bool]) -> None:
        """Count skipped updates, and warn of outliers.

        Args:
            metrics: metrics of the step.
            skipped: for each update of the step that had a loss, whether it was skipped as non-finite.

        Raises:
            TooManyBadSteps: --max_bad_steps updates in a row were skipped.
        """
        if any(skipped):
            self.log.info(
                f"warning: step {step}: {sum(skipped)} of {len(skipped)} updates skipped on all ranks, since a loss or "
                "a gradient was not finite; the models did not change"
            )
        for update_skipped in skipped:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if update_skipped else 0
            if update_skipped and 0 < self.run.max_bad_steps <= self.skipped_in_a_row:
                checkpoint = newest_checkpoint(self.run.output_dir)
                self.log.info(
                    f"{self.skipped_in_a_row} updates in a row were skipped (--max_bad_steps): "
                    + (f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint")
                    + "; lower the learning rate, or check the data of these steps"
                )
                raise TooManyBadSteps
        for name in METRICS_WITH_OUTLIER_WARNING:
            if name in metrics:
                self._warn_of_outlier(step, name, metrics[name])
        if self.stop_at_kl and metrics.get("kl", 0.0) >= self.stop_at_kl and not self.ends_early:
            self.ends_early = True
            kl = metrics["kl"]
            self.log.info(f"step {step}: KL {kl:.4g} has reached --stop_at_kl {self.stop_at_kl}: the run ends")

    def _warn_of_outlier(self, step: int, name: str, value: float) -> None:
        """Warn of an outlier; update mean and variance by Welford 1962 (doi:10.1080/00401706.1962.10490022)."""
        if not math.isfinite(value):
            return
        count, mean, squares = self.moments.get(name, [0, 0.0, 0.0])
        deviation = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
        if self.run.warn_sigma and count >= MIN_SAMPLES and abs(value - mean) > self.run.warn_sigma * deviation > 0:
            self.log.info(
                f"warning: step {step}: {name} {value:.4g} is {abs(value - mean) / deviation:.1f} standard deviations "
                f"from its mean {mean:.4g}"
            )
        count += 1
        delta = value - mean
        mean += delta / count
        self.moments[name] = [count, mean, squares + delta * (value - mean)]
