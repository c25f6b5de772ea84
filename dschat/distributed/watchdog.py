"""Abort a run in which a rank hangs or fails: background threads exchange heartbeats and end all ranks together."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import distributed as dist

from dschat.distributed.failure import Failure, confirm, wait_for_readers
from dschat.distributed.heartbeats import HUNG, Heartbeats, process_name
from dschat.distributed.terminal import printable

GRACE_SECONDS = 5.0  # seconds for a rank to fail by itself after another rank has failed
READERS_TIMEOUT = 3.0  # seconds that rank 0, which hosts the store, waits for the others to read the failure
FOLDER_POLL_SECONDS = 5.0  # seconds between two measurements of the size of a folder
CHECKPOINT_THREAD = "checkpoint"  # joined before exit: it completes a checkpoint already on disk


class Watchdog:
    """Two background threads: one exchanges heartbeats, the other ends this process if the run aborts.

    Attributes:
        phase: name of what this rank is doing.
        progress: counter of finished pieces of work, of any kind.
    """

    def __init__(
        self, *, seconds: float, store: dist.Store, rank: int, world_size: int,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:  # fmt: skip
        """Start both threads.

        Args:
            seconds: timeout for the heartbeats of a rank, and for progress on any rank.
            store: store shared by the ranks; a client for this object only.
            end_process: ends the process with an exit status.
        """
        self.seconds, self.store, self.rank, self.world_size = seconds, store, rank, world_size
        self.end_process = end_process
        self.phase, self.progress = "start", 0
        self._heartbeats = Heartbeats(store, rank=rank, world_size=world_size, seconds=seconds)
        self._last_response = time.monotonic()  # of the store
        self._failure: Failure | None = None
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"watchdog-{target.__name__.strip('_')}", daemon=True)
            for target in (self._exchange_heartbeats, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def enter_phase(self, phase: str) -> None:
        """Record that this rank enters another phase."""
        self.phase = phase
        self.progress += 1

    def advance(self) -> None:
        """Record progress of this rank in its phase."""
        self.progress += 1

    def close(self) -> None:
        """Stop both threads."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def fail(self, problem: str, status: int) -> str:
        """Report that this rank has failed: stop the threads, and abort the others with this problem and exit status.

        Returns: the problem of a rank that failed earlier, which may be the cause; "" if there is none.
        """
        self._stop.set()
        text = f"rank {self.rank} ({process_name()}) has failed in phase {self.phase!r}: {problem}"
        # In another thread, since calls to the store block for ever if its host is gone.
        publishing = threading.Thread(target=self._publish, args=(Failure(text, status or 1),), daemon=True)
        publishing.start()
        publishing.join(timeout=GRACE_SECONDS)
        return self._failure.problem if self._failure and self._failure.problem != text else ""

    def _publish(self, failure: Failure) -> None:
        """Publish a failure, unless there is one, and confirm that this rank has read it."""
        try:
            failure.publish(self.store)
            self._failure = Failure.read(self.store)
            self._confirm()
        except RuntimeError:
            pass  # rank 0 is gone, which the other ranks detect by themselves

    def _confirm(self) -> None:
        confirm(self.store, self.rank)
        if self.rank == 0:
            wait_for_readers(self.store, range(self.world_size), seconds=READERS_TIMEOUT)

    @property
    def _interval(self) -> float:
        return min(self.seconds / 4, 10.0)

    def _exchange_heartbeats(self) -> None:
        """Thread: exchange heartbeats until there is a failure."""
        next_heartbeat = 0.0
        while not self._stop.wait(min(self._interval, 1.0)) and self._failure is None:
            try:
                failure = Failure.read(self.store)
                if failure is None and time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + self._interval
                    failure = self._heartbeats.exchange(self.progress, self.phase)
                    if failure is not None:
                        failure.publish(self.store)
                        failure = Failure.read(self.store)
                self._last_response, self._failure = time.monotonic(), failure
            except RuntimeError as error:  # the rank that hosts the store is gone
                self._failure = Failure(f"the store of the ranks is closed, so rank 0 has ended ({error})", HUNG)

    def _watch(self) -> None:
        """End this process if there is a failure, or if the store does not respond."""
        while not self._stop.wait(min(self._interval, 0.5)):
            failure, waited = self._failure, time.monotonic() - self._last_response
            if failure is None and waited > self.seconds + self._interval:
                failure = Failure(
                    f"rank 0, which hosts the ranks' store, has not responded for {waited:.0f} s "
                    "(--collective_timeout)",
                    HUNG, hang=True,
                )  # fmt: skip
            if failure is not None:
                self._end(failure)
                return

    def _end(self, failure: Failure) -> None:
        """Print why the run aborts, let a checkpoint on disk be completed, and end this process."""
        publishing = threading.Thread(target=self._publish, args=(failure,), daemon=True)
        publishing.start()
        if not failure.hang and self._stop.wait(GRACE_SECONDS):
            return  # this rank is failing by itself
        status = f"Rank {self.rank} is in phase {self.phase!r}" + (", here:" if failure.hang else " and ends, too")
        print(printable(f"{failure.problem}. {status}"), file=sys.stderr, flush=True)
        if failure.hang:
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            sys.stderr.flush()
        for thread in threading.enumerate():
            if thread.name == CHECKPOINT_THREAD:
                thread.join(timeout=self.seconds)
        publishing.join(timeout=READERS_TIMEOUT + 1)
        self.end_process(failure.status)


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
    """Report that this rank has failed: abort the other ranks, which print this rank and its problem.

    Returns: the problem of a rank that failed earlier; "" if this is the first.
    """
    global _current
    earlier = ""
    if _current is not None:
        earlier = _current.fail(problem, status)
        _current.close()
    _current = None
    return earlier


def phase(name: str) -> None:
    """Record that this rank enters another phase; every call counts as progress."""
    if _current is not None:
        _current.enter_phase(name)


@contextmanager
def watch_folder(folder: str | Path) -> Iterator[None]:
    """Inside, a change of the folder's size counts as progress: for long writes inside a library."""

    def poll() -> None:
        size = -1
        while not ended.wait(FOLDER_POLL_SECONDS):
            previous, size = size, _size(Path(folder))
            if size != previous:
                progress()

    ended = threading.Event()
    thread = threading.Thread(target=poll, name="watchdog-watch_folder", daemon=True)
    if _current is not None:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def _size(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*"))
    except OSError:  # a file was removed meanwhile
        return -1


_condition = threading.local()  # .event: see progress_only_while


@contextmanager
def progress_only_while(event: threading.Event) -> Iterator[None]:
    """Inside, this thread's progress counts only while the event is set.

    For a background thread with timeouts of its own, which must not hide that the main thread hangs.
    """
    _condition.event = event
    try:
        yield
    finally:
        del _condition.event


def progress() -> None:
    """Count progress of this rank: a row, a file, a batch. Cheap, so call it in every long loop."""
    event: threading.Event | None = getattr(_condition, "event", None)
    if _current is not None and (event is None or event.is_set()):
        _current.advance()
