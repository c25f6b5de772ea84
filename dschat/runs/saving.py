"""When a run saves itself: every so many steps or minutes, and when a signal asks for it."""

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
    """Asked at every step boundary by all ranks, it saves where that is due.

    What is left to do once all files are on the disk, checksums above all, is done beside the training that goes on.

    Attributes:
        seconds: that training has waited for all saves so far.
    """

    def __init__(
        self, run: RunArguments, engines: checkpoint.Engines, log: RunLog, received: SignalFlag, *, device: torch.device
    ) -> None:
        """Tell what a checkpoint will take, before the first.

        Args:
            received: the signals that this rank gets.
            device: of this rank; NCCL agrees on nothing else.
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
        also: Callable[[Path], None] | None = None,
    ) -> None:  # fmt: skip
        """Save here if it is due, and leave if a signal has asked for that. A collective.

        Args:
            step: finished steps.
            state: see checkpoint.save.
            update: updates of the step after it that are finished, too; --save_interval counts whole steps only.
            last: the run ends here by itself: nothing has to be left.
            also: see checkpoint.save.

        Raises:
            SavedAndLeft: a signal came, and the run is saved.
            OSError: a signal came, and the run cannot be saved.
        """
        minutes = (time.monotonic() - self.last) / 60
        due = self.run.save_minutes and minutes >= self.run.save_minutes and collectives.is_main()
        asked = torch.tensor([bool(due), bool(self.received.number)], dtype=torch.float64, device=self.device)
        by_time, by_signal = collectives.max_over_ranks(asked).tolist()
        by_step = bool(self.run.save_interval) and not update and step % self.run.save_interval == 0
        leaves = bool(by_signal) and not last
        if not (by_step or by_time or leaves):
            return
        watchdog.phase("checkpoint")
        started = time.monotonic()
        self.finish()
        try:
            folder = checkpoint.save(
                self.run.output_dir, step, update=update, engines=self.engines, state=dict(state),
                keep=self.run.keep_checkpoints, also=also, about=self.log.about,
                later=None if leaves or last else self._begin_finishing,
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
        """Wait for what is still done of the save before."""
        if self._finishing is not None:
            self._finishing.join()
        self._finishing = None

    def _begin_finishing(self, work: Callable[[], None]) -> None:
        def finishing() -> None:
            try:
                work()
            except checkpoint.WRITE_ERRORS as error:
                self.log.say(f"warning: the checkpoint cannot be written: {error}. The run goes on unsaved")

        # Not a daemon: a run that ends by an exception still completes its checkpoint.
        self._finishing = threading.Thread(target=finishing, name=watchdog.CHECKPOINT_THREAD)
        self._finishing.start()
