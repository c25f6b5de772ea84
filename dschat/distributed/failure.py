"""The failure that aborts a run: written once to the store that all ranks share, and read by every rank."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from torch import distributed as dist

KEY, READ_BY = "run/failure", "run/failure/read_by"


@dataclass(frozen=True)
class Failure:
    """The first failure that aborts the run.

    Attributes:
        problem: which rank, and what happened to it.
        status: exit status of the ranks that it aborts.
        hang: whether the run hangs instead of failing with an exception; every rank then dumps its stack.
    """

    problem: str
    status: int
    hang: bool = False

    def publish(self, store: dist.Store) -> None:
        """Write it to the store, unless another rank was first."""
        store.compare_set(KEY, "", json.dumps(asdict(self)))

    @staticmethod
    def read(store: dist.Store) -> Failure | None:
        """The failure in the store, or None."""
        return Failure(**json.loads(store.get(KEY))) if store.check([KEY]) else None


def confirm(store: dist.Store, rank: int) -> None:
    """Acknowledge that this rank has read the failure."""
    store.set(f"{READ_BY}/{rank}", "1")


def wait_for_readers(store: dist.Store, ranks: Iterable[int], *, seconds: float) -> None:
    """Wait until these ranks have read the failure, or for `seconds`; called by the rank that hosts the store."""
    keys = [f"{READ_BY}/{rank}" for rank in ranks]
    deadline = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.05)
