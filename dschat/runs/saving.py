"""When checkpoints are saved: every --save_interval steps, every --save_minutes, and on a signal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dschat.arguments import RunArguments
from dschat.checkpoints import checkpoint
from dschat.distributed import collectives, watchdog
from dschat.runs.run_log import RunLog
from dschat.runs.signals import SavedAndLeft, SignalFlag


class Saving:
    """Saves checkpoints at the step boundaries at which they are due.

    Checksums and renaming run in a background thread once all files are on disk, while training continues.

    Attributes:
        seconds: total time that training has been blocked by saving.
    """

    def __init__(
        self, run: RunArguments, engines: checkpoint.Engines, log: RunLog, received: SignalFlag, *, device: torch.device
    ) -> None:
        """Log the expected size of a checkpoint.

        Args:
            received: the signal that this rank has received, if any.
            device: device of this rank; NCCL reduces no CPU tensors.
        """
        self.run, self.engines, self.log, self.received, self.device = run, engines, log, received, device
        self.seconds, self.started = 0.0, time.monotonic()
        self._finishing: threading.Thread | None = None
        self.last = self.started
        if run.save_interval or run.save_minutes:
            size = checkpoint.expected_bytes(engines)
            log.say(f"a checkpoint takes about {size / 1e9:.2f} GB, {run.keep_checkpoints} are kept")

    def save_if_due(
        self, step: int, state: Mapping[str, Any], *, update: int = 0, last: bool = False,
        also: Callable[[Path], None] | None = None, force: bool = False,
    ) -> None:  # fmt: skip
        """Save a checkpoint if one is due; end the run if any rank has received a signal. A collective.

        Args:
            step: number of finished steps.
            state: see checkpoint.save.
            update: number of finished updates of the next step; --save_interval counts whole steps only.
            last: this is the last step, so a signal saves nothing and does not end the run here.
            also: see checkpoint.save.
            force: save even if none is due, and not in the background.

        Raises:
            SavedAndLeft: a signal was received, and the checkpoint is saved.
            OSError: a signal was received, and the checkpoint cannot be saved.
        """
        minutes = (time.monotonic() - self.last) / 60
        due = self.run.save_minutes and minutes >= self.run.save_minutes and collectives.is_main()
        asked = torch.tensor([bool(due), bool(self.received.number)], dtype=torch.float64, device=self.device)
        by_time, by_signal = collectives.max_over_ranks(asked).tolist()
        by_step = bool(self.run.save_interval) and not update and step % self.run.save_interval == 0
        leaves = bool(by_signal) and not last
        if not (by_step or by_time or leaves or force):
            return
        watchdog.phase("checkpoint")
        started = time.monotonic()
        self.finish()
        try:
            folder = checkpoint.save(
                self.run.output_dir, step, update=update, engines=self.engines, state=dict(state),
                keep=self.run.keep_checkpoints, also=also, about=self.log.about,
                later=None if leaves or last or force else self._begin_finishing,
            )  # fmt: skip
        except OSError as error:
            if leaves:
                raise
            self.log.say(f"warning: {error}. The run goes on unsaved")
            return
        finally:
            self.last = time.monotonic()
            self.seconds += self.last - started
        share = self.seconds / (self.last - self.started)
        self.log.say(f"saving {folder} took {self.last - started:.1f} s; saving has taken {share:.1%} of the time")
        if leaves:
            self.log.say("a signal asked for it: this run ends here, --resume auto goes on")
            raise SavedAndLeft

    def finish(self) -> None:
        """Wait for the background work of the previous save."""
        if self._finishing is not None:
            self._finishing.join()
        self._finishing = None

    def _begin_finishing(self, work: Callable[[], None]) -> None:
        def finishing() -> None:
            try:
                work()
            except checkpoint.WRITE_ERRORS as error:
                self.log.say(f"warning: the checkpoint cannot be written: {error}. The run goes on unsaved")

        # Not a daemon thread: a run that ends by an exception still completes its checkpoint.
        self._finishing = threading.Thread(target=finishing, name=watchdog.CHECKPOINT_THREAD)
        self._finishing.start()
