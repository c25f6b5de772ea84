"""Abort a run in which a rank hangs or fails: every rank sends heartbeats to a store, and rank 0 ends the run for all.

A run hangs if a rank stops its heartbeats, or if no rank makes progress; waiting for another rank's long work is fine.
Ranks only communicate through the store, so the traffic grows linearly with their number.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import distributed as dist

from dschat.distributed.terminal import printable
from dschat.distributed.verdict import Verdict, confirm, wait_for_readers

HUNG = 70  # exit status of all ranks if one hung (EX_SOFTWARE)
GRACE = 5.0  # seconds for a rank to fail by itself after another rank has failed
LATE = 3.0  # seconds that rank 0, which hosts the store, waits for the others to read why the run ends
FOLLOWING_INTERVAL = 5.0  # seconds between two measurements of the size of a folder
CHECKPOINT_THREAD = "checkpoint"  # joined before exit: it completes a checkpoint already on disk


@dataclass
class Report:
    """Last report of a rank, and when (by the reader's clock) its heartbeat and its progress last changed."""

    beat: int
    progress: int
    phase: str
    process: str
    heard: float
    progressed: float


class Watchdog:
    """Two background threads: one exchanges reports through the store, the other ends this process if the run aborts.

    Attributes:
        phase: name of what this rank is doing.
        progress: counter of finished pieces of work, of any kind.
    """

    def __init__(
        self, *, seconds: float, store: dist.Store, rank: int, world_size: int,
        leave: Callable[[int], None] = os._exit,
    ) -> None:  # fmt: skip
        """Start both threads.

        Args:
            seconds: timeout for the heartbeats of a rank, and for progress on any rank.
            store: store shared by the ranks; a client for this object only.
            leave: ends the process with an exit status.
        """
        self.seconds, self.store, self.rank, self.world_size, self.leave = seconds, store, rank, world_size, leave
        self.phase, self.progress = "start", 0
        self._started = self._answered = time.monotonic()
        self._reports: dict[int, Report] = {}
        self._verdict: Verdict | None = None
        self._stop = threading.Event()
        self._beats = 0
        self._threads = [
            threading.Thread(target=target, name=f"watchdog-{target.__name__.strip('_')}", daemon=True)
            for target in (self._talk, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def enter(self, phase: str) -> None:
        """This rank enters another phase."""
        self.phase = phase
        self.progress += 1

    def advance(self) -> None:
        """This rank has made progress in its phase."""
        self.progress += 1

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def fail(self, problem: str, status: int) -> str:
        """This rank has failed: stop the threads, and abort the other ranks with this problem and exit status.

        Returns: the problem of a rank that failed earlier, which may be the cause; "" if there is none.
        """
        self._stop.set()
        text = f"rank {self.rank} ({_process()}) has failed in phase {self.phase!r}: {problem}"
        # In another thread, since calls to the store block for ever if its host is gone.
        telling = threading.Thread(target=self._tell, args=(Verdict(text, status or 1),), daemon=True)
        telling.start()
        telling.join(timeout=GRACE)
        return self._verdict.problem if self._verdict and self._verdict.problem != text else ""

    def _tell(self, verdict: Verdict) -> None:
        try:
            verdict.publish(self.store)
            self._verdict = Verdict.read(self.store)
            self._confirm()
        except RuntimeError:
            pass  # rank 0 is gone, which the other ranks detect by themselves

    def _confirm(self) -> None:
        confirm(self.store, self.rank)
        if self.rank == 0:
            wait_for_readers(self.store, range(self.world_size), seconds=LATE)

    @property
    def _interval(self) -> float:
        return min(self.seconds / 4, 10.0)

    def _talk(self) -> None:
        """Thread: send reports, and read those of all ranks (rank 0) or of rank 0, until there is a verdict."""
        next_report = 0.0
        while not self._stop.wait(min(self._interval, 1.0)) and self._verdict is None:
            try:
                verdict = Verdict.read(self.store)
                if verdict is None and time.monotonic() >= next_report:
                    next_report = time.monotonic() + self._interval
                    verdict = self._report()
                    if verdict is not None:
                        verdict.publish(self.store)
                        verdict = Verdict.read(self.store)
                self._answered, self._verdict = time.monotonic(), verdict
            except RuntimeError as error:  # the rank that hosts the store is gone
                self._verdict = Verdict(f"the ranks' store is gone, and with it rank 0 ({error})", HUNG)

    def _report(self) -> Verdict | None:
        """Send a report, and check the reports of other ranks; returns a verdict if the run hangs."""
        self._beats += 1
        word = json.dumps([self._beats, self.progress, self.phase, _process()])
        self.store.set(f"alive/{self.rank}", word)
        for rank in range(self.world_size) if self.rank == 0 else [0]:
            self._read(rank)
        silent = self._silent_rank()
        return silent or (self._all_stand_still() if self.rank == 0 else None)

    def _read(self, rank: int) -> None:
        now, key = time.monotonic(), f"alive/{rank}"
        if not self.store.check([key]):
            self._reports.setdefault(rank, Report(0, 0, "start", "never heard of", self._started, self._started))
            return
        beat, progress, phase, process = json.loads(self.store.get(key))
        before = self._reports.get(rank)
        self._reports[rank] = Report(
            beat, progress, phase, process,
            heard=before.heard if before and before.beat == beat else now,
            progressed=before.progressed if before and before.progress == progress else now,
        )  # fmt: skip

    def _silent_rank(self) -> Verdict | None:
        for rank, report in self._reports.items():
            silent = time.monotonic() - report.heard
            if silent > self.seconds:
                return Verdict(
                    f"rank {rank} ({report.process}) has been silent for {silent:.0f} s (--collective_timeout), "
                    f"in phase {report.phase!r}",
                    HUNG, hang=True,
                )  # fmt: skip
        return None

    def _all_stand_still(self) -> Verdict | None:
        """A verdict if no rank makes progress; the rank that stopped first is listed first: others may wait for it."""
        now, ranks = time.monotonic(), sorted(self._reports, key=lambda rank: self._reports[rank].progressed)
        if now - self._reports[ranks[-1]].progressed <= self.seconds:
            return None
        listed = [
            f"rank {rank} ({self._reports[rank].process}) has been in phase {self._reports[rank].phase!r} for "
            f"{now - self._reports[rank].progressed:.0f} s"
            for rank in ranks[:4]
        ]
        more = f", and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return Verdict(f"no rank makes progress (--collective_timeout): {', '.join(listed)}{more}", HUNG, hang=True)

    def _watch(self) -> None:
        """End this process if there is a verdict, or if the store does not respond."""
        while not self._stop.wait(min(self._interval, 0.5)):
            verdict, unanswered = self._verdict, time.monotonic() - self._answered
            if verdict is None and unanswered > self.seconds + self._interval:
                verdict = Verdict(
                    f"rank 0, which holds the ranks' store, has been silent for {unanswered:.0f} s "
                    "(--collective_timeout)",
                    HUNG, hang=True,
                )  # fmt: skip
            if verdict is not None:
                self._end(verdict)
                return

    def _end(self, verdict: Verdict) -> None:
        telling = threading.Thread(target=self._tell, args=(verdict,), daemon=True)
        telling.start()
        if not verdict.hang and self._stop.wait(GRACE):
            return  # this rank is failing by itself
        here = f"Rank {self.rank} is in phase {self.phase!r}" + (", here:" if verdict.hang else " and ends, too")
        print(printable(f"{verdict.problem}. {here}"), file=sys.stderr, flush=True)
        if verdict.hang:
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            sys.stderr.flush()
        for thread in threading.enumerate():
            if thread.name == CHECKPOINT_THREAD:
                thread.join(timeout=self.seconds)
        telling.join(timeout=LATE + 1)
        self.leave(verdict.status)


def _process() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


_current: Watchdog | None = None


def start(seconds: float) -> None:
    """Start the watchdog: a rank that hangs for `seconds` aborts the run, and every responsive rank prints a report.

    Does nothing with one process, which may be stopped in a debugger for hours.
    """
    global _current
    stop()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # A separate client, since the main thread may block in the default one.
    store = dist.distributed_c10d._get_default_store().clone()
    _current = Watchdog(seconds=seconds, store=store, rank=dist.get_rank(), world_size=dist.get_world_size())


def stop() -> None:
    """Stop the watchdog."""
    global _current
    if _current is not None:
        _current.close()
    _current = None


def fail(problem: str, status: int) -> str:
    """This rank has failed: abort the other ranks, which print this rank and its problem.

    Returns: the problem of a rank that failed earlier; "" if this is the first.
    """
    global _current
    before = ""
    if _current is not None:
        before = _current.fail(problem, status)
        _current.close()
    _current = None
    return before


def phase(name: str) -> None:
    """This rank enters another phase; every call counts as progress."""
    if _current is not None:
        _current.enter(name)


@contextmanager
def following(folder: str | Path) -> Iterator[None]:
    """Inside, growth of a folder counts as progress: for long writes inside a library."""

    def follow() -> None:
        size = -1
        while not ended.wait(FOLLOWING_INTERVAL):
            before, size = size, _size(Path(folder))
            if size != before:
                progress()

    ended = threading.Event()
    thread = threading.Thread(target=follow, name="watchdog-following", daemon=True)
    if _current is not None:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def _size(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*"))
    except OSError:  # files come and go
        return -1


def progress() -> None:
    """Count progress of this rank: a row, a file, a batch. Cheap, so call it in every long loop."""
    if _current is not None:
        _current.advance()
