"""Rendezvous of ranks: complete, with missing ranks, and with too many."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
from torch import distributed as dist

from dschat.distributed.launch_environment import LaunchError
from dschat.distributed.rendezvous import open_store, wait_for_ranks


def run_concurrently(*calls) -> list[str]:
    """The error message of each call, run in threads of their own; "" if it succeeds."""
    errors = [""] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()
        except LaunchError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def joining(store: dist.Store, rank: int, world_size: int, seconds: float = 30.0):
    return lambda: wait_for_ranks(store, rank, world_size, seconds=seconds, timeout=seconds)


def test_the_rendezvous_completes_when_all_ranks_join():
    store = dist.HashStore()
    assert run_concurrently(*(joining(store, rank, 3) for rank in range(3))) == ["", "", ""]


def test_missing_ranks_are_listed_by_every_other_rank():
    store = dist.HashStore()
    errors = run_concurrently(*(joining(store, rank, 5, seconds=0.5) for rank in (0, 2)))
    assert all(text.startswith("ranks 1, 3, 4 of 5 did not join within 0 s (--rendezvous_timeout)") for text in errors)


def test_the_same_rank_on_two_processes_is_refused():
    store = dist.HashStore()
    wait_for_ranks(store, 0, 1, seconds=5, timeout=5)
    (errors,) = run_concurrently(joining(store, 0, 1))
    assert errors.startswith("RANK 0 was given to two processes")


def test_different_world_sizes_are_refused_without_waiting():
    port = free_port()

    def rank(number: int, world_size: int):
        return lambda: open_store(number, world_size, address="127.0.0.1", port=port, seconds=60)

    started = time.monotonic()
    errors = run_concurrently(rank(0, 3), rank(1, 2))
    assert errors == ["WORLD_SIZE 2 on rank 1, but 3 on rank 0: set the same value on all ranks"] * 2
    assert time.monotonic() - started < 50, "did not wait for missing ranks"


def test_a_port_that_is_in_use_is_named():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(LaunchError, match=f"MASTER_PORT {port} is in use on this host"):
            open_store(0, 2, address="127.0.0.1", port=port, seconds=5)


def test_an_unknown_host_and_a_missing_rank_0_are_named():
    for rank in (0, 1):
        with pytest.raises(LaunchError, match="MASTER_ADDR no.such.host.invalid: no such host"):
            open_store(rank, 2, address="no.such.host.invalid", port=29500, seconds=5)
    with pytest.raises(LaunchError, match=r"rank 1 found no rank 0 at 127.0.0.1:\d+ within 1 s"):
        open_store(1, 2, address="127.0.0.1", port=free_port(), seconds=1)


def test_under_torchrun_the_agent_hosts_the_store_and_each_restart_has_its_own_rendezvous(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        assert run_concurrently(
            *(lambda r=r: open_store(r, 2, address="127.0.0.1", port=agent.port, seconds=30) for r in range(2))
        ) == ["", ""]  # fmt: skip


def test_a_rank_that_is_terminated_while_it_waits_ends_the_others(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        "from dschat.distributed import launch\n"
        "launch.run(lambda: launch.join(seed=1, rendezvous_timeout=100))\n"
    )
    plain = os.environ | {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, script], stderr=subprocess.PIPE, text=True, env=plain | {"RANK": rank, "LOCAL_RANK": rank}
        )
        for rank in "01"
    ]
    store = None
    deadline = time.monotonic() + 60
    while store is None and time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            socket.create_connection(("127.0.0.1", int(plain["MASTER_PORT"])), timeout=1).close()
            store = dist.TCPStore("127.0.0.1", int(plain["MASTER_PORT"]), wait_for_workers=False)
        except OSError:
            continue
    store.wait(["rendezvous/0/joined/0", "rendezvous/0/joined/1"], timedelta(seconds=60))
    started[1].send_signal(signal.SIGTERM)
    errors = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [2, 128 + signal.SIGTERM]
    assert "rank 1 has ended" in errors[0] and "SIGTERM: the run ends without saving" in errors[1]
    assert "Traceback" not in "".join(errors)
