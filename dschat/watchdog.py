"""Notices ranks that hang: every rank tells the others that it lives and what it does, and reads the same of them."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time

from torch import distributed as dist

HUNG = 70  # exit status of ranks that left because one hung (EX_SOFTWARE)


class Watchdog:
    """A thread beside the training. A rank that is silent, or stays in one phase too long, ends the run.

    Attributes:
        phase: what this rank is doing.
    """

    def __init__(self, *, seconds: float, store: dist.Store, rank: int, world_size: int) -> None:
        """Start watching.

        Args:
            seconds: as long may a rank stay silent, or in one phase.
            store: shared by the ranks.
        """
        self.seconds, self.store, self.rank, self.world_size = seconds, store, rank, world_size
        self.phase, self.since = "start", time.monotonic()
        self._heard: dict[int, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, phase: str) -> None:
        """This rank begins something else."""
        self.phase, self.since = phase, time.monotonic()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        beat, pause = 0, min(self.seconds / 4, 10.0)
        while not self._stop.wait(pause):
            beat += 1
            problem = self._silent_rank(beat)
            stuck = time.monotonic() - self.since
            if problem is None and stuck > self.seconds:
                problem = f"rank {self.rank} has been in phase {self.phase!r} for {stuck:.0f} s"
            if problem is not None and not self._stop.is_set():
                self._leave(problem)

    def _silent_rank(self, beat: int) -> str | None:
        """Tell that this rank lives; what is wrong with another, if anything is."""
        word = json.dumps([beat, self.phase, socket.gethostname(), os.getpid()])
        try:
            self.store.set(f"alive/{self.rank}", word)
            words = {r: self.store.get(f"alive/{r}").decode() for r in range(self.world_size) if self._spoke(r)}
        except RuntimeError as error:  # the rank that holds the store is gone
            return None if self._stop.is_set() else f"the ranks' store is gone, and with it rank 0 ({error})"
        now = time.monotonic()
        for rank, text in words.items():
            if rank not in self._heard or self._heard[rank][0] != text:
                self._heard[rank] = text, now
            elif now - self._heard[rank][1] > self.seconds:
                _, phase, host, pid = json.loads(text)
                silent = now - self._heard[rank][1]
                return f"rank {rank} ({host}, process {pid}) has been silent for {silent:.0f} s, in phase {phase!r}"
        return None

    def _spoke(self, rank: int) -> bool:
        return rank == self.rank or self.store.check([f"alive/{rank}"])

    def _leave(self, problem: str) -> None:
        print(
            f"{problem} (--collective_timeout). Rank {self.rank} is in phase {self.phase!r}, here:",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        time.sleep(min(self.seconds / 2, 3.0))  # the others tell where they are, too
        os._exit(HUNG)


_current: Watchdog | None = None


def start(seconds: float) -> None:
    """From now on a rank that hangs for so many seconds ends the run, with a report of every rank that can speak.

    A process alone keeps nobody waiting: whoever holds it in a debugger may do so for hours.
    """
    global _current
    stop()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # A client of its own: the main thread may be waiting in the other one.
    store = dist.distributed_c10d._get_default_store().clone()
    _current = Watchdog(seconds=seconds, store=store, rank=dist.get_rank(), world_size=dist.get_world_size())


def stop() -> None:
    """Watch no longer."""
    global _current
    if _current is not None:
        _current.close()
    _current = None


def phase(name: str) -> None:
    """This rank begins something else; every call is a sign of progress."""
    if _current is not None:
        _current.enter(name)
