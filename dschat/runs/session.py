"""What the loops of all steps share: resume, log, saving, health, the best model and signals of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from datasets import Dataset

from dschat.arguments import flag_values
from dschat.arguments.command_line import settings_of_user
from dschat.checkpoints import checkpoint
from dschat.data.arrow import content_digest
from dschat.data.batches import GlobalBatches
from dschat.distributed import collectives
from dschat.runs.best_model import Best
from dschat.runs.health import Health
from dschat.runs.run_log import RunLog
from dschat.runs.saving import Saving
from dschat.runs.signals import SignalFlag


class TrainingSession:
    """One run from its start, or from a checkpoint, to its end.

    As a context manager it listens for signals, and at the end waits for the last save and closes the log.

    Args:
        name: of the step, for the log.
        settings: the step's argument groups; `run` is one of them.
        engines: the trained engines by name; a checkpoint holds them.
        fingerprint: what must be equal for a checkpoint to belong to this run, see `data_fingerprint`.
        total_steps: optimizer steps, in step 3 iterations.
        resume_from: a checkpoint that checkpoint.find has verified, or None for a new run.
        device: of this rank.
        received: signals; it listens inside the context, and where that ends well behind it: the export follows.
        stop_at_kl: see Health.
        restore: is given the loop's state of the checkpoint, and the flags that have changed since (a line each; it may
            add to them). Raises ValueError if the run cannot go on from it.

    Attributes:
        resumed_state: what the checkpoint's loop had saved; {} in a new run.
        first_step: finished steps at the start.

    Raises:
        SettingsError: the checkpoint does not belong to this run.
    """

    def __init__(
        self, name: str, *, settings: Any, engines: checkpoint.Engines, fingerprint: Mapping[str, Any],
        total_steps: int, resume_from: Path | None, device: torch.device, received: SignalFlag, stop_at_kl: float = 0.0,
        restore: Callable[[dict[str, Any], list[str]], None] | None = None,
    ) -> None:  # fmt: skip
        self.run, self.engines, self.fingerprint = settings.run, engines, dict(fingerprint)
        self.total_steps, self.device, self.received = total_steps, device, received
        self.resumed_state: dict[str, Any] = {}
        changed: list[str] = []
        if resume_from:
            with settings_of_user():
                changed = checkpoint.changed_arguments(resume_from, settings, anyway=self.run.resume_anyway)
                self.resumed_state = checkpoint.load(resume_from, engines=engines, same=self.fingerprint)
                if restore is not None:
                    restore(self.resumed_state, changed)
        self.first_step = self.resumed_state.get("step", 0)
        tensorboard = self.run.tensorboard_path or str(Path(self.run.output_dir, "tensorboard"))
        self.log = RunLog(
            self.run.output_dir, name=name, arguments=flag_values(settings), total_steps=total_steps,
            tensorboard=tensorboard if self.run.enable_tensorboard else None,
            finished_steps=self.first_step if resume_from else None,
        )  # fmt: skip
        if resume_from:
            self.log.say(f"resuming from {resume_from}" + (f"; changed since: {'; '.join(changed)}" if changed else ""))
        self.health = Health(self.run, self.log, self.resumed_state.get("health"), stop_at_kl=stop_at_kl)
        self.best = Best(self.run, self.log, self.resumed_state.get("best"))
        self._stack = ExitStack()

    def __enter__(self) -> TrainingSession:
        self._stack.enter_context(self.received.listening())
        self.saving = Saving(self.run, self.engines, self.log, self.received, device=self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.saving.finish()
        self._stack.__exit__(kind, error, trace)
        if error is None:
            self.log.close()

    @property
    def evaluates_first(self) -> bool:
        """Whether to evaluate before the first step: in a new run, and where another --best_metric begins."""
        return self.best.begins or (self.first_step == 0 and not self.resumed_state.get("update"))

    def is_last(self, step: int) -> bool:
        """Whether the run ends with this finished step: all are done, or the KL divergence has reached its limit."""
        return step == self.total_steps or self.health.ends_early

    def evaluation_is_due(self, step: int) -> bool:
        """Whether to evaluate after this finished step."""
        interval = self.run.eval_interval
        return self.is_last(step) or bool(interval and step % interval == 0)

    def log_evaluation(
        self, step: int, metrics: Mapping[str, float], *, export: Callable[[Path], None],
        samples: Iterable[Mapping[str, Any]] = (),
    ) -> None:  # fmt: skip
        """Log an evaluation, and keep the model if it is the best so far. A collective.

        Args:
            metrics: the same on all ranks; {} where there were no rows.
            export: writes the model into a folder, on all ranks.
        """
        if metrics:
            self.log.metrics(step, metrics, phase="eval")
            self.log.samples(step, samples, phase="eval")
        with settings_of_user():
            self.best.update_best(step, metrics, export)

    def save_if_due(
        self, step: int, loop_state: Mapping[str, Any] | None = None, *, update: int = 0,
        extra_writer: Callable[[Path], Any] | None = None,
    ) -> None:  # fmt: skip
        """Save where that is due, and end the run if a signal has asked for it. A collective; see Saving.save_if_due.

        Args:
            step: finished steps.
            loop_state: what the step's own loop continues with, JSON, the same on all ranks.
            update: finished updates of the step after it.
            extra_writer: called on every rank with the checkpoint's folder, to add files.
        """
        state = {
            "step": step, "update": update, "health": self.health.state, "best": self.best.state,
            **(loop_state or {}), **self.fingerprint,
        }  # fmt: skip
        last = not update and self.is_last(step)
        self.saving.save_if_due(step, state, update=update, last=last, also=extra_writer)


def data_fingerprint(batches: GlobalBatches, rows: Dataset | None = None) -> dict[str, int | str]:
    """What decides which rows a step sees; a resumed run must have the same (see checkpoint.load). A collective.

    Args:
        rows: the prepared rows, whose content counts too; the main rank reads all of it.
    """
    fingerprint = {"rows": len(batches.lengths), "global_batch_size": batches.global_batch_size, "seed": batches.seed}
    if rows is not None:
        # Reference log-probs are no data: other devices, or another cut into batches, give them other low bits.
        data = rows.select_columns([name for name in rows.column_names if name != "ref_logprobs"])
        content = content_digest(data) if collectives.is_main() else ""
        fingerprint["content"] = collectives.all_gather_objects(content)[0]
    return fingerprint
