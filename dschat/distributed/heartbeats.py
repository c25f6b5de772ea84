"""Heartbeats of the ranks: each sends reports to a store, and reads those of the others to detect that the run hangs.

A run hangs if a rank stops its heartbeats, or if no rank makes progress; waiting for another rank's long work is fine.
Ranks only communicate through the store, so the traffic grows linearly with their number.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass

from torch import distributed as dist

from dschat.distributed.failure import Failure

HUNG = 70  # exit status of all ranks if one hangs (EX_SOFTWARE)
MAX_LISTED = 4  # maximum number of ranks that a message lists


@dataclass
class Report:
    """Last report of a rank, and when (by the reader's clock) its heartbeat and its progress last changed."""

    beat: int
    progress: int
    phase: str
    process: str
    last_beat: float
    last_progress: float


class Heartbeats:
    """Exchanges reports with the other ranks: rank 0 reads those of all ranks, the others that of rank 0."""

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, seconds: float) -> None:
        """
        Args:
            store: store shared by the ranks; a client for the calling thread only.
            seconds: timeout for the heartbeats of a rank, and for progress on any rank.
        """
        self.store, self.rank, self.world_size, self.seconds = store, rank, world_size, seconds
        self.started = time.monotonic()
        self.beats = 0
        self.reports: dict[int, Report] = {}

    def exchange(self, progress: int, phase: str) -> Failure | None:
        """Send this rank's report and read the others'; returns a failure if the run hangs."""
        self.beats += 1
        self.store.set(f"alive/{self.rank}", json.dumps([self.beats, progress, phase, process_name()]))
        for rank in range(self.world_size) if self.rank == 0 else [0]:
            self._read(rank)
        return self._unresponsive_rank() or (self._no_progress() if self.rank == 0 else None)

    def _read(self, rank: int) -> None:
        now, key = time.monotonic(), f"alive/{rank}"
        if not self.store.check([key]):
            self.reports.setdefault(rank, Report(0, 0, "start", "no heartbeat yet", self.started, self.started))
            return
        beat, progress, phase, process = json.loads(self.store.get(key))
        previous = self.reports.get(rank)
        self.reports[rank] = Report(
            beat, progress, phase, process,
            last_beat=previous.last_beat if previous and previous.beat == beat else now,
            last_progress=previous.last_progress if previous and previous.progress == progress else now,
        )  # fmt: skip

    def _unresponsive_rank(self) -> Failure | None:
        for rank, report in self.reports.items():
            waited = time.monotonic() - report.last_beat
            if waited > self.seconds:
                return Failure(
                    f"rank {rank} ({report.process}) has sent no heartbeat for {waited:.0f} s (--collective_timeout), "
                    f"in phase {report.phase!r}",
                    HUNG, hang=True,
                )  # fmt: skip
        return None

    def _no_progress(self) -> Failure | None:
        """A failure if no rank makes progress; the rank that stopped first is listed first: others may wait for it."""
        now, reports = time.monotonic(), sorted(self.reports.items(), key=lambda entry: entry[1].last_progress)
        if now - reports[-1][1].last_progress <= self.seconds:
            return None
        listed = [
            f"rank {rank} ({report.process}) has been in phase {report.phase!r} for {now - report.last_progress:.0f} s"
            for rank, report in reports[:MAX_LISTED]
        ]
        more = f", and {len(reports) - MAX_LISTED} more" if len(reports) > MAX_LISTED else ""
        return Failure(f"no rank makes progress (--collective_timeout): {', '.join(listed)}{more}", HUNG, hang=True)


def process_name() -> str:
    """Host and process id, for messages."""
    return f"{socket.gethostname()}, process {os.getpid()}"
