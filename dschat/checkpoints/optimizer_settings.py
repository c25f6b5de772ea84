"""What the flags of a run say of its optimizers, kept while a checkpoint is loaded.

A checkpoint brings moments, counters and the place in the schedule. DeepSpeed and torch restore the settings that it
was written under as well: learning rates, weight decay, betas, the bound of the gradient norm. Those are the user's to
change between two starts, so they are put back, and the learning rate follows the schedule of this run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed

STATE = ("params", "step")  # of a parameter group: what belongs to the run and not to its flags


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of one engine's optimizer.

    Attributes:
        groups: of each parameter group, everything but its parameters.
        base_learning_rates: of each group, what the schedule multiplies.
        max_grad_norm: of DeepSpeed's optimizer wrapper; None where there is none, and the configuration counts.
    """

    groups: list[dict[str, Any]]
    base_learning_rates: list[float]
    max_grad_norm: float | None

    @classmethod
    def of(cls, engine: deepspeed.DeepSpeedEngine) -> OptimizerSettings:
        groups = [
            {name: value for name, value in group.items() if name not in STATE}
            for group in engine.optimizer.param_groups
        ]
        return cls(groups, list(engine.lr_scheduler.base_lrs), getattr(engine.optimizer, "clip_grad", None))

    def apply(self, engine: deepspeed.DeepSpeedEngine) -> None:
        """Give them to an engine; its learning rates are those of its schedule at the place that it has reached."""
        scheduler = engine.lr_scheduler
        scheduler.base_lrs = list(self.base_learning_rates)
        rates = [
            base * factor(scheduler.last_epoch)
            for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        scheduler._last_lr = rates
        for group, own, rate in zip(engine.optimizer.param_groups, self.groups, rates, strict=True):
            group.update(own | {"lr": rate})
        if self.max_grad_norm is not None:
            engine.optimizer.clip_grad = self.max_grad_norm


@contextmanager
def settings_kept(engines: Mapping[str, deepspeed.DeepSpeedEngine]) -> Iterator[None]:
    """Inside, checkpoints may be loaded; afterwards every trained engine has the settings that it was built with."""
    trained = {name: engine for name, engine in engines.items() if engine.optimizer is not None}
    settings = {name: OptimizerSettings.of(engine) for name, engine in trained.items()}
    yield
    for name, engine in trained.items():
        settings[name].apply(engine)
