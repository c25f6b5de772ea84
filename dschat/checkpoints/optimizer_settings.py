"""Keep the optimizer settings of the current flags while a checkpoint is loaded.

Loading restores moments, step counters and the position in the schedule, as it should. DeepSpeed and torch also restore
the settings of the saved run: learning rates, weight decay, betas, gradient clipping. Users may change those between
runs, so they are reset to the current flags, and the learning rate follows the schedule of this run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed

NOT_SETTINGS = ("params", "step")  # entries of a parameter group that are not settings


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of one engine's optimizer.

    Attributes:
        groups: entries of each parameter group, without parameters and step.
        base_learning_rates: learning rate of each group, which the schedule multiplies.
        max_grad_norm: of DeepSpeed's optimizer wrapper; None if there is none and the configuration applies.
    """

    groups: list[dict[str, Any]]
    base_learning_rates: list[float]
    max_grad_norm: float | None

    @classmethod
    def of(cls, engine: deepspeed.DeepSpeedEngine) -> OptimizerSettings:
        groups = [
            {name: value for name, value in group.items() if name not in NOT_SETTINGS}
            for group in engine.optimizer.param_groups
        ]
        return cls(groups, list(engine.lr_scheduler.base_lrs), getattr(engine.optimizer, "clip_grad", None))

    def apply(self, engine: deepspeed.DeepSpeedEngine) -> None:
        """Apply the settings to an engine; learning rates are those of the schedule at its current step."""
        scheduler = engine.lr_scheduler
        scheduler.base_lrs = list(self.base_learning_rates)
        rates = [
            base * factor(scheduler.last_epoch)
            for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        scheduler._last_lr = rates
        for group, settings, rate in zip(engine.optimizer.param_groups, self.groups, rates, strict=True):
            group.update(settings | {"lr": rate})
        if self.max_grad_norm is not None:
            engine.optimizer.clip_grad = self.max_grad_norm


@contextmanager
def keep_optimizer_settings(engines: Mapping[str, deepspeed.DeepSpeedEngine]) -> Iterator[None]:
    """Restore the settings of every trained engine after the block, in which a checkpoint is loaded."""
    trained = {name: engine for name, engine in engines.items() if engine.optimizer is not None}
    settings = {name: OptimizerSettings.of(engine) for name, engine in trained.items()}
    yield
    for name, engine in trained.items():
        settings[name].apply(engine)
