"""When checkpoints are saved: every --save_interval steps, every --save_minutes, and on a signal."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dschat.arguments import RunArguments
from dschat.checkpoints.disk_space import expected_bytes
from dschat.checkpoints.saving import Engines, save_checkpoint
from dschat.checkpoints.selection import newest_checkpoint
from dschat.checkpoints.write_errors import WRITE_ERRORS
from dschat.distributed import collectives, watchdog
from dschat.distributed.termination import EndedBySignal
from dschat.runs.run_log import RunLog
from dschat.runs.signals import ExitAfterSave, SignalFlag


class CheckpointSaver:
    """Saves checkpoints at the step boundaries at which they are due.

    Checksums and renaming run in a background thread once all files are on disk, while training continues.

    Attributes:
        seconds: total time that training has been blocked by saving.
    """

    def __init__(self, run: RunArguments, engines: Engines, log: RunLog, signal_flag: SignalFlag) -> None:
        """Log the expected size of a checkpoint.

        Args:
            signal_flag: the signal that this rank has received, if any.
        """
        self.run, self.engines, self.log, self.signal_flag = run, engines, log, signal_flag
        self.device = next(iter(engines.values())).device  # NCCL reduces no CPU tensors
        self.seconds, self.started = 0.0, time.monotonic()
        self._background: threading.Thread | None = None
        self.last_save = self.started
        if run.save_interval or run.save_minutes:
            size = expected_bytes(engines.values())
            log.info(f"a checkpoint takes about {size / 1e9:.2f} GB, {run.keep_checkpoints} are kept")

    def save_if_due(
        self, step: int, state: Mapping[str, Any], *, update: int = 0, last: bool = False,
        extra_writer: Callable[[Path], Any] | None = None, force: bool = False,
    ) -> None:  # fmt: skip
        """Save a checkpoint if one is due; end the run if any rank has received a signal. A collective.

        Args:
            step: number of finished steps.
            state: see save_checkpoint.
            update: number of finished updates of the next step; --save_interval counts whole steps only.
            last: this is the last step, so a signal saves nothing and does not end the run here.
            extra_writer: see save_checkpoint.
            force: save even if none is due, and not in the background.

        Raises:
            ExitAfterSave: a signal was received, and the checkpoint is saved.
            EndedBySignal: a signal was received, and the checkpoint cannot be saved; the reason has been logged.
        """
        due, signal_number = self._agree(step, update)
        due |= force
        ends_run = bool(signal_number) and not last
        if not (due or ends_run):
            return
        watchdog.phase("checkpoint")
        started = time.monotonic()
        self.finish()
        try:
            folder = save_checkpoint(
                self.run.output_dir, step, update=update, engines=self.engines, state=dict(state),
                keep=self.run.keep_checkpoints, metadata=self.log.metadata, extra_writer=extra_writer,
                run_in_background=None if ends_run or last or force else self._start_background,
            )  # fmt: skip
        except OSError as error:
            if ends_run:
                self._log_lost_steps(signal_number, step, error)
                raise EndedBySignal(signal_number) from None
            self.log.info(f"warning: {error}. The run continues without it")
            return
        finally:
            self.last_save = time.monotonic()
            self.seconds += self.last_save - started
        share = self.seconds / (self.last_save - self.started)
        seconds = self.last_save - started
        self.log.info(f"saving {folder} took {seconds:.1f} s; saving has taken {share:.1%} of the time")
        if ends_run:
            self.log.info(f"{signal.Signals(signal_number).name}: the run ends here; --resume auto continues it")
            raise ExitAfterSave

    def _agree(self, step: int, update: int) -> tuple[bool, int]:
        """Whether a checkpoint is due, and the number of the signal that any rank has received. A collective."""
        minutes = (time.monotonic() - self.last_save) / 60
        by_time = self.run.save_minutes and minutes >= self.run.save_minutes and collectives.is_main()
        requests = torch.tensor([bool(by_time), self.signal_flag.number], dtype=torch.float64, device=self.device)
        by_time, signal_number = collectives.max_over_ranks(requests).tolist()
        by_step = bool(self.run.save_interval) and not update and step % self.run.save_interval == 0
        return by_step or bool(by_time), int(signal_number)

    def _log_lost_steps(self, signal_number: int, step: int, error: OSError) -> None:
        """Log that the run ends without a checkpoint, and from which step it can be resumed."""
        newest = newest_checkpoint(self.run.output_dir)
        if newest is None:
            remedy = "There is no earlier checkpoint to resume from"
        else:
            lost = step - int(newest.name.split("-")[1])
            remedy = (
                f"The last complete checkpoint is {newest}"
                + (f", {lost} step{'s' if lost > 1 else ''} earlier" if lost > 0 else "")
                + ": make room, then --resume auto continues from there"
            )
        name = signal.Signals(signal_number).name
        self.log.info(f"{name}: the run ends at step {step} without saving it: {error}. {remedy}")

    def finish(self) -> None:
        """Wait for the background work of the previous save."""
        if self._background is not None:
            self._background.join()
        self._background = None

    def _start_background(self, complete: Callable[[], None]) -> None:
        def complete_or_warn() -> None:
            try:
                complete()
            except WRITE_ERRORS as error:
                self.log.info(f"warning: the checkpoint cannot be written: {error}. The run continues without it")

        # Not a daemon thread: a run that ends by an exception still completes its checkpoint.
        self._background = threading.Thread(target=complete_or_warn, name=watchdog.CHECKPOINT_THREAD)
        self._background.start()
