"""Ranks that hang, fail or are merely slow: threads in place of ranks, over a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import distributed as dist

from dschat.distributed import watchdog
from dschat.distributed.verdict import Verdict
from dschat.distributed.watchdog import HUNG, Watchdog

SECONDS = 2.0  # the hang timeout of a rank


class CountingStore(dist.Store):
    """A store that counts requests."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.requests = store, 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "get", "check", "add", "compare_set"):
            object.__setattr__(self, "requests", object.__getattribute__(self, "requests") + 1)
            return getattr(object.__getattribute__(self, "store"), name)
        return object.__getattribute__(self, name)


class Ranks:
    """Several watchdogs over one store, and the exit statuses they would have used."""

    def __init__(self, count: int, store: dist.Store | None = None) -> None:
        self.left: dict[int, int] = {}
        store = store or dist.HashStore()
        self.stores = [CountingStore(store) for _ in range(count)]
        self.watchdogs = [
            Watchdog(seconds=SECONDS, store=self.stores[rank], rank=rank, world_size=count, leave=self.leaving(rank))
            for rank in range(count)
        ]

    def leaving(self, rank: int) -> Callable[[int], None]:
        return lambda status: self.left.setdefault(rank, status)

    def silence(self, rank: int) -> None:
        """Stop the rank's thread that reports, as SIGSTOP would."""
        self.watchdogs[rank]._verdict = Verdict("", 0)
        self.watchdogs[rank]._end = lambda verdict: None

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.left) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(self.left) == count, self.left


@pytest.fixture
def ranks(monkeypatch) -> Iterator[Callable[..., Ranks]]:
    monkeypatch.setattr(watchdog, "GRACE", 0.5)
    monkeypatch.setattr(watchdog, "LATE", 0.5)
    started: list[Ranks] = []

    def start(count: int, store: dist.Store | None = None) -> Ranks:
        started.append(Ranks(count, store))
        return started[-1]

    yield start
    for group in started:
        for one in group.watchdogs:
            one._stop.set()


def test_ranks_that_wait_for_one_that_makes_progress_are_left_alone(ranks):
    group = ranks(3)
    group.watchdogs[0].enter("data preparation")
    for _ in range(int(3 * SECONDS / 0.1)):  # three times the timeout
        group.watchdogs[0].advance()
        time.sleep(0.1)
    assert group.left == {}


def test_without_progress_on_any_rank_all_leave_and_name_the_first_that_stopped(ranks, capfd):
    group = ranks(3)
    group.watchdogs[2].enter("sampling")
    for _ in range(30):  # longer than heartbeats are delayed on a busy machine
        for rank in (0, 1):
            group.watchdogs[rank].enter("update")
        time.sleep(0.1)
    group.wait_for(3)
    assert set(group.left.values()) == {HUNG}
    said = capfd.readouterr().err
    assert "no rank makes progress (--collective_timeout): rank 2 (" in said and "in phase 'sampling' for" in said
    assert said.count("Rank 1 is in phase 'update', here:") == 1 and "_watch" in said, "with a stack"


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_rank_is_named_by_all_others_though_they_make_progress(silent, ranks, capfd):
    group = ranks(3)
    group.watchdogs[silent].enter("update")
    time.sleep(1.5)  # it has reported
    group.silence(silent)
    deadline = time.monotonic() + 60
    while len(group.left) < 2 and time.monotonic() < deadline:
        for one in group.watchdogs:
            one.advance()
        time.sleep(0.1)
    assert set(group.left) == {0, 1, 2} - {silent}
    said = capfd.readouterr().err
    assert said.count(f"rank {silent} (") >= 2 and "has been silent for" in said and "in phase 'update'" in said


def test_a_rank_that_was_never_heard_of_counts_as_silent(ranks, capfd):
    group = ranks(1)
    group.watchdogs[0].world_size = 2
    for _ in range(100):
        group.watchdogs[0].advance()
        time.sleep(0.1)
        if group.left:
            break
    assert group.left == {0: HUNG} and "rank 1 (never heard of) has been silent" in capfd.readouterr().err


def test_a_rank_that_fails_ends_the_others_with_its_status_and_its_name(ranks, capfd):
    group = ranks(3)
    group.watchdogs[1].enter("update")
    group.watchdogs[1].fail("KeyError: 'a fault'", 3)
    group.wait_for(2)
    assert group.left == {0: 3, 2: 3}
    said = capfd.readouterr().err
    assert said.count("has failed in phase 'update': KeyError: 'a fault'. Rank") == 2 and "rank 1 (" in said


def test_ranks_that_fail_of_the_same_thing_leave_by_themselves(ranks, capfd):
    group = ranks(2)
    failing = [threading.Thread(target=one.fail, args=("the same mistake", 2)) for one in group.watchdogs]
    for thread in failing:
        thread.start()
        time.sleep(0.2)
    for thread in failing:
        thread.join()
    time.sleep(2)
    assert group.left == {} and capfd.readouterr().err == ""


def test_leaving_waits_for_a_checkpoint_that_is_being_completed(ranks):
    group, completed = ranks(2), []
    saving = threading.Thread(target=lambda: completed.append(time.sleep(2)), name=watchdog.CHECKPOINT_THREAD)
    saving.start()
    group.leaving = None
    group.watchdogs[0].leave = lambda status: group.left.setdefault(0, (status, len(completed)))
    group.watchdogs[1].fail("no more", 1)
    group.wait_for(1)
    assert group.left[0] == (1, 1)


def test_a_store_that_is_gone_or_does_not_answer_ends_a_rank(ranks, capfd):
    class Gone(dist.HashStore):
        def check(self, keys):
            raise RuntimeError("connection reset by peer")

    class Stuck(dist.HashStore):
        def check(self, keys):
            time.sleep(3600)

    gone, stuck = ranks(1, Gone()), ranks(1, Stuck())
    gone.wait_for(1)
    stuck.wait_for(1)
    assert gone.left == stuck.left == {0: HUNG}
    said = capfd.readouterr().err
    assert "store is gone, and with it rank 0 (connection reset" in said
    assert "rank 0, which holds the ranks' store, has been silent" in said


def test_traffic_grows_with_the_number_of_ranks_and_not_with_its_square(ranks):
    requests = {}
    for count in (4, 16):
        group = ranks(count)
        for one in group.watchdogs:
            one._stop.set()
        for store, one in zip(group.stores, group.watchdogs, strict=True):
            for thread in one._threads:
                thread.join()
            store.requests = 0
        for one in group.watchdogs:
            one._report()
        for one in group.watchdogs:
            one._report()
        requests[count] = sum(store.requests for store in group.stores)
    assert requests[16] <= 4.5 * requests[4]
