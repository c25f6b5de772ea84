"""Ranks that hang, fail or are merely slow: threads in place of ranks, over a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import distributed as dist

from dschat.distributed import watchdog
from dschat.distributed.failure import Failure
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
    """Several watchdogs over one store, and the exit statuses that they would have ended their processes with."""

    def __init__(self, count: int, store: dist.Store | None = None) -> None:
        self.exited: dict[int, int] = {}
        store = store or dist.HashStore()
        self.stores = [CountingStore(store) for _ in range(count)]
        self.watchdogs = [
            Watchdog(
                seconds=SECONDS, store=self.stores[rank], rank=rank, world_size=count,
                end_process=self.record_exit(rank),
            )  # fmt: skip
            for rank in range(count)
        ]

    def record_exit(self, rank: int) -> Callable[[int], None]:
        return lambda status: self.exited.setdefault(rank, status)

    def stop_heartbeats(self, rank: int) -> None:
        """Stop the rank's heartbeats, as SIGSTOP would."""
        self.watchdogs[rank]._failure = Failure("", 0)
        self.watchdogs[rank]._end = lambda failure: None

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.exited) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(self.exited) == count, self.exited


@pytest.fixture
def ranks(monkeypatch) -> Iterator[Callable[..., Ranks]]:
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(watchdog, "READERS_TIMEOUT", 0.5)
    started: list[Ranks] = []

    def start(count: int, store: dist.Store | None = None) -> Ranks:
        started.append(Ranks(count, store))
        return started[-1]

    yield start
    for group in started:
        for each in group.watchdogs:
            each._stop.set()


def test_ranks_may_wait_longer_than_the_timeout_for_one_that_makes_progress(ranks):
    group = ranks(3)
    group.watchdogs[0].enter_phase("data preparation")
    for _ in range(int(3 * SECONDS / 0.1)):  # three times the timeout
        group.watchdogs[0].advance()
        time.sleep(0.1)
    assert group.exited == {}


def test_without_progress_on_any_rank_all_end_and_list_the_rank_that_stopped_first(ranks, capfd):
    group = ranks(3)
    group.watchdogs[2].enter_phase("sampling")
    for _ in range(30):  # longer than heartbeats are delayed on a busy machine
        for rank in (0, 1):
            group.watchdogs[rank].enter_phase("update")
        time.sleep(0.1)
    group.wait_for(3)
    assert set(group.exited.values()) == {HUNG}
    output = capfd.readouterr().err
    assert "no rank makes progress (--collective_timeout): rank 2 (" in output and "in phase 'sampling' for" in output
    assert output.count("Rank 1 is in phase 'update', here:") == 1 and "_watch" in output, "with a stack trace"


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_without_heartbeats_ends_the_others_although_they_make_progress(stopped, ranks, capfd):
    group = ranks(3)
    group.watchdogs[stopped].enter_phase("update")
    time.sleep(1.5)  # it has sent heartbeats
    group.stop_heartbeats(stopped)
    deadline = time.monotonic() + 60
    while len(group.exited) < 2 and time.monotonic() < deadline:
        for each in group.watchdogs:
            each.advance()
        time.sleep(0.1)
    assert set(group.exited) == {0, 1, 2} - {stopped}
    output = capfd.readouterr().err
    assert output.count(f"rank {stopped} (") >= 2
    assert "has sent no heartbeat for" in output and "in phase 'update'" in output


def test_a_rank_that_never_sent_a_heartbeat_counts_as_hung(ranks, capfd):
    group = ranks(1)
    group.watchdogs[0]._heartbeats.world_size = 2
    for _ in range(100):
        group.watchdogs[0].advance()
        time.sleep(0.1)
        if group.exited:
            break
    assert group.exited == {0: HUNG} and "rank 1 (no heartbeat yet) has sent no heartbeat" in capfd.readouterr().err


def test_a_rank_that_fails_ends_the_others_with_its_exit_status_and_its_error(ranks, capfd):
    group = ranks(3)
    group.watchdogs[1].enter_phase("update")
    group.watchdogs[1].fail("KeyError: 'a fault'", 3)
    group.wait_for(2)
    assert group.exited == {0: 3, 2: 3}
    output = capfd.readouterr().err
    assert output.count("has failed in phase 'update': KeyError: 'a fault'. Rank") == 2 and "rank 1 (" in output


def test_ranks_that_all_fail_are_not_ended_by_the_watchdog(ranks, capfd):
    group = ranks(2)
    failing = [threading.Thread(target=each.fail, args=("the same mistake", 2)) for each in group.watchdogs]
    for thread in failing:
        thread.start()
        time.sleep(0.2)
    for thread in failing:
        thread.join()
    time.sleep(2)
    assert group.exited == {} and capfd.readouterr().err == ""


def test_a_checkpoint_is_completed_before_the_process_ends(ranks):
    group, completed = ranks(2), []
    saving = threading.Thread(target=lambda: completed.append(time.sleep(2)), name=watchdog.CHECKPOINT_THREAD)
    saving.start()
    group.watchdogs[0].end_process = lambda status: group.exited.setdefault(0, (status, len(completed)))
    group.watchdogs[1].fail("no more", 1)
    group.wait_for(1)
    assert group.exited[0] == (1, 1)


def test_a_store_that_is_closed_or_does_not_respond_ends_a_rank(ranks, capfd):
    class Closed(dist.HashStore):
        def check(self, keys):
            raise RuntimeError("connection reset by peer")

    class Stuck(dist.HashStore):
        def check(self, keys):
            time.sleep(3600)

    closed, stuck = ranks(1, Closed()), ranks(1, Stuck())
    closed.wait_for(1)
    stuck.wait_for(1)
    assert closed.exited == stuck.exited == {0: HUNG}
    output = capfd.readouterr().err
    assert "store of the ranks is closed, so rank 0 has ended (connection reset" in output
    assert "rank 0, which hosts the ranks' store, has not responded" in output


def test_store_traffic_grows_linearly_with_the_number_of_ranks(ranks):
    requests = {}
    for count in (4, 16):
        group = ranks(count)
        for each in group.watchdogs:
            each._stop.set()
        for store, each in zip(group.stores, group.watchdogs, strict=True):
            for thread in each._threads:
                thread.join()
            store.requests = 0
        for each in group.watchdogs:
            each._heartbeats.exchange(each.progress, each.phase)
        for each in group.watchdogs:
            each._heartbeats.exchange(each.progress, each.phase)
        requests[count] = sum(store.requests for store in group.stores)
    assert requests[16] <= 4.5 * requests[4]
