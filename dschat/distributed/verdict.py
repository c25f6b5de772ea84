"""Why a run ends before its time: written once into the store that all ranks share, and read by every rank."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from torch import distributed as dist

KEY, READ_BY = "run/verdict", "run/verdict/read_by"


@dataclass(frozen=True)
class Verdict:
    """The first reason for which a rank gave the run up.

    Attributes:
        problem: which rank, and what happened to it.
        status: exit status of the ranks that leave because of it.
        hang: nobody raised anything: where each rank stands is worth a stack.
    """

    problem: str
    status: int
    hang: bool = False

    def publish(self, store: dist.Store) -> None:
        """Set it, unless there is one already."""
        store.compare_set(KEY, "", json.dumps(asdict(self)))

    @staticmethod
    def read(store: dist.Store) -> Verdict | None:
        """The verdict, if there is one."""
        return Verdict(**json.loads(store.get(KEY))) if store.check([KEY]) else None


def confirm(store: dist.Store, rank: int) -> None:
    """Note that this rank knows that the run has ended."""
    store.set(f"{READ_BY}/{rank}", "1")


def wait_for_readers(store: dist.Store, ranks: Iterable[int], *, seconds: float) -> None:
    """Keep the store open until these ranks know, or time is up; for the rank whose process holds it."""
    keys = [f"{READ_BY}/{rank}" for rank in ranks]
    deadline = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.05)
