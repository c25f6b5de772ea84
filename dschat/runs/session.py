"""What the training loops of all steps share: resume, logging, metric checks, checkpoints, best model, signals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from datasets import Dataset

from dschat.arguments import flag_values
from dschat.arguments.command_line import as_settings_errors
from dschat.checkpoints.loading import changed_arguments, load_checkpoint
from dschat.checkpoints.saving import Engines
from dschat.data.arrow import content_digest
from dschat.data.batches import GlobalBatches
from dschat.distributed import collectives
from dschat.runs.best_model import BestModel
from dschat.runs.checkpoint_saver import CheckpointSaver
from dschat.runs.health import Health
from dschat.runs.run_log import RunLog
from dschat.runs.signals import SignalFlag


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The state from which a run starts: a checkpoint, or nothing for a new run.

    Attributes:
        checkpoint: a checkpoint that find_checkpoint has verified, or None for a new run.
        fingerprint: entries that must match those of the checkpoint, see `data_fingerprint`.
        restore: called with the loop state of the checkpoint and the list of changed flags (a line each; it may append
            to it). Raises ValueError if the run cannot be resumed from that state.
    """

    checkpoint: Path | None
    fingerprint: Mapping[str, Any]
    restore: Callable[[dict[str, Any], list[str]], None] | None = None

    def load(self, engines: Engines, settings: Any) -> tuple[dict[str, Any], list[str]]:
        """Restore the engines and the loop. Returns the loop state and the changed flags; {} and [] in a new run.

        Raises: ValueError if the checkpoint does not belong to this run.
        """
        if self.checkpoint is None:
            return {}, []
        changed = changed_arguments(self.checkpoint, settings, resume_anyway=settings.run.resume_anyway)
        state = load_checkpoint(self.checkpoint, engines=engines, fingerprint=dict(self.fingerprint))
        if self.restore is not None:
            self.restore(state, changed)
        return state, changed


class TrainingSession:
    """One training run, new or resumed from a checkpoint.

    Entering the context installs the signal handlers; leaving it waits for the last checkpoint and closes the log.

    Args:
        name: name of the step, for the log.
        settings: the step's argument groups, including `run`.
        engines: the trained engines by name, which checkpoints contain.
        total_steps: number of optimizer steps (in step 3, of iterations).
        resume: the checkpoint to resume from, if any.
        signal_flag: handles signals inside the context, and after it if it ends without an exception: export follows.
        stop_at_kl: KL divergence that ends the run, see Health; 0: none.

    Attributes:
        resumed_state: the loop state loaded from the checkpoint; {} in a new run.
        first_step: number of steps that were finished when this run started.

    Raises:
        SettingsError: the checkpoint does not belong to this run.
    """

    def __init__(
        self, name: str, *, settings: Any, engines: Engines, total_steps: int, resume: ResumePoint,
        signal_flag: SignalFlag, stop_at_kl: float = 0.0,
    ) -> None:  # fmt: skip
        self.run, self.engines, self.fingerprint = settings.run, engines, dict(resume.fingerprint)
        self.total_steps, self.signal_flag = total_steps, signal_flag
        with as_settings_errors():
            self.resumed_state, changed = resume.load(engines, settings)
        self.first_step = self.resumed_state.get("step", 0)
        self.log = RunLog(
            self.run.output_dir, name=name, arguments=flag_values(settings), total_steps=total_steps,
            logging_steps=self.run.logging_steps, report_to=self.run.trackers, tensorboard=self.run.tensorboard_path,
            run_name=self.run.run_name,
            finished_steps=self.first_step if resume.checkpoint else None,
        )  # fmt: skip
        if resume.checkpoint:
            changes = f"; changed since: {'; '.join(changed)}" if changed else ""
            self.log.info(f"resuming from {resume.checkpoint}{changes}")
        self.health = Health(self.run, self.log, self.resumed_state.get("health"), stop_at_kl=stop_at_kl)
        self.best = BestModel(self.run, self.log, self.resumed_state.get("best"))
        self._stack = ExitStack()

    def __enter__(self) -> TrainingSession:
        self._stack.enter_context(self.signal_flag.installed())
        self.saver = CheckpointSaver(self.run, self.engines, self.log, self.signal_flag)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.saver.finish()
        self._stack.__exit__(kind, error, trace)
        self.log.close("finished" if error is None else f"ended by {kind.__name__}: {error}".rstrip(": "))

    @property
    def evaluates_first(self) -> bool:
        """Whether to evaluate before the first step: in a new run, and if --best_metric has changed."""
        return self.best.needs_evaluation or (self.first_step == 0 and not self.resumed_state.get("update"))

    def is_last(self, step: int) -> bool:
        """Whether this finished step is the last: all steps are done, or the KL divergence has reached its limit."""
        return step == self.total_steps or self.health.ends_early

    def evaluation_is_due(self, step: int) -> bool:
        """Whether to evaluate after this finished step."""
        interval = self.run.eval_interval
        return self.is_last(step) or bool(interval and step % interval == 0)

    def log_evaluation(
        self, step: int, metrics: Mapping[str, float], *, export: Callable[[Path], None],
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> None:  # fmt: skip
        """Log an evaluation, and export the model if it is the best so far. A collective.

        Args:
            metrics: the same on all ranks; {} if there were no evaluation rows.
            export: writes the model into a folder, on all ranks.
        """
        if metrics:
            self.log.metrics(step, metrics, phase="eval")
            if samples:
                self.log.samples(step, samples, phase="eval")
        with as_settings_errors():
            self.best.update_best(step, metrics, export)

    def save_if_due(
        self, step: int, loop_state: Mapping[str, Any] | None = None, *, update: int = 0,
        extra_writer: Callable[[Path], Any] | None = None, force: bool = False,
    ) -> None:  # fmt: skip
        """Save a checkpoint if one is due; end the run if a signal was received. A collective; see CheckpointSaver.

        Args:
            step: number of finished steps.
            loop_state: JSON state that the training loop needs to resume, the same on all ranks.
            update: number of finished updates of the step after it.
            extra_writer: called on every rank with the checkpoint's folder, to add files.
            force: save even if none is due, completely before this returns.
        """
        state = {
            "step": step, "update": update, "health": self.health.state, "best": self.best.state,
            **(loop_state or {}), **self.fingerprint,
        }  # fmt: skip
        last = not update and self.is_last(step)
        self.saver.save_if_due(step, state, update=update, last=last, extra_writer=extra_writer, force=force)


def data_fingerprint(batches: GlobalBatches, rows: Dataset | None = None) -> dict[str, int | str]:
    """Identifies the rows of every step; a resumed run must have the same fingerprint (load_checkpoint). A collective.

    Args:
        rows: the prepared rows, if their content is to be hashed too; the main rank reads all of them.
    """
    fingerprint = {"rows": len(batches.lengths), "global_batch_size": batches.global_batch_size, "seed": batches.seed}
    if rows is not None:
        # Without reference log-probs: their low bits depend on the device and on the batch composition.
        data = rows.select_columns([name for name in rows.column_names if name != "ref_logprobs"])
        content = content_digest(data) if collectives.is_main() else ""
        fingerprint["content"] = collectives.all_gather_objects(content)[0]
    return fingerprint
