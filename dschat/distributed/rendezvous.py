"""Rendezvous: connect all ranks to one TCPStore before the process group is created."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch import distributed as dist

from dschat.distributed.failure import Failure, confirm, wait_for_readers
from dschat.distributed.launch_environment import LaunchError

READERS_TIMEOUT = 3.0  # seconds that rank 0 keeps the store open for others to read why the run ends
MAX_LISTED = 8  # maximum number of missing ranks that a message lists


def open_store(rank: int, world_size: int, *, address: str, port: int, seconds: float) -> dist.Store:
    """Connect to the store, which rank 0 hosts (under torchrun, its agent), and wait for all ranks.

    Args:
        seconds: timeout for missing ranks.

    Raises:
        LaunchError: the port is in use, the address does not resolve, rank 0 is not reachable, ranks are missing after
            the timeout, or two processes have the same rank or different world sizes.
    """
    deadline = time.monotonic() + seconds
    agent_hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts_store = rank == 0 and not agent_hosts_store
    _check_address(address)
    if not hosts_store:
        _wait_for_port(rank, address, port, deadline, seconds)
    try:
        tcp = dist.TCPStore(
            address, port, None, is_master=hosts_store, wait_for_workers=False,
            timeout=timedelta(seconds=max(1.0, seconds)),
        )  # fmt: skip
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise _connection_error(error, address, port, hosts_store) from error
    # torchrun restarts failed ranks, and its store may outlive them.
    store = dist.PrefixStore(f"rendezvous/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", tcp)
    with _publishing_errors(store, rank, world_size, hosts_store):
        wait_for_ranks(store, rank, world_size, seconds=max(0.0, deadline - time.monotonic()), timeout=seconds)
    return tcp


def wait_for_ranks(store: dist.Store, rank: int, world_size: int, *, seconds: float, timeout: float) -> None:
    """Wait until every rank has joined.

    Args:
        seconds: time left of the timeout.
        timeout: the whole timeout in seconds, for the message.

    Raises:
        LaunchError: see open_store.
    """
    if store.add(f"joined/{rank}", 1) > 1:
        raise LaunchError(
            f"RANK {rank} was given to two processes (this one runs on {socket.gethostname()}): every process needs a "
            "RANK of its own, from 0 to WORLD_SIZE - 1",
            on_this_rank=True,
        )
    deadline = time.monotonic() + seconds
    if rank == 0:
        store.set("world_size", str(world_size))
    if _wait_for_key(store, "world_size", deadline) and (size := int(store.get("world_size"))) != world_size:
        raise LaunchError(
            f"WORLD_SIZE {world_size} on rank {rank}, but {size} on rank 0: set the same value on all ranks",
            on_this_rank=True,
        )
    if store.add("count", 1) == world_size:
        store.set("complete", "1")
    if not _wait_for_key(store, "complete", deadline):
        raise LaunchError(_missing(store, world_size, timeout))


def _wait_for_key(store: dist.Store, key: str, deadline: float) -> bool:
    """Wait for a key; False on timeout. Raises LaunchError if another rank has failed."""
    pause = 0.01
    while not store.check([key]):
        failure = Failure.read(store)
        if failure is not None:
            raise LaunchError(failure.problem)
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return True


def _missing(store: dist.Store, world_size: int, timeout: float) -> str:
    missing = [number for number in range(world_size) if not store.check([f"joined/{number}"])]
    more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
    numbers = ", ".join(map(str, missing[:MAX_LISTED])) + more
    return (
        f"rank{'s' if len(missing) > 1 else ''} {numbers} of {world_size} did not join within {timeout:.0f} s "
        "(--rendezvous_timeout): read the output of these processes, or start WORLD_SIZE processes"
    )


@contextmanager
def _publishing_errors(store: dist.Store, rank: int, world_size: int, hosts_store: bool) -> Iterator[None]:
    """Publish an exception of the block to the ranks that wait in the rendezvous."""
    try:
        yield
    except BaseException as error:
        status = 2 if isinstance(error, LaunchError) else 1
        try:
            problem = str(error) if isinstance(error, LaunchError) else f"rank {rank} has ended: {error!r}"
            Failure(problem, status).publish(store)
            confirm(store, rank)
            if hosts_store:
                joined = [number for number in range(world_size) if store.check([f"joined/{number}"])]
                wait_for_readers(store, joined, seconds=READERS_TIMEOUT)
        except RuntimeError:
            pass  # the store is closed: no rank is left to notify
        if isinstance(error, RuntimeError):
            raise LaunchError(f"rank 0 has ended while the ranks joined ({error}): read its output") from error
        raise


def _check_address(address: str) -> None:
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        raise LaunchError(f"MASTER_ADDR {address}: no such host ({error}); name the host of rank 0") from error


def _wait_for_port(rank: int, address: str, port: int, deadline: float, seconds: float) -> None:
    """Wait until the port is open. In Python, since torch's own wait cannot be interrupted."""
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"rank {rank} found no rank 0 at {address}:{port} within {seconds:.0f} s (--rendezvous_timeout; "
                    f"{error}): rank 0 is missing, or MASTER_ADDR and MASTER_PORT are not its address"
                ) from error
        time.sleep(0.2)


def _connection_error(error: Exception, address: str, port: int, hosts_store: bool) -> LaunchError:
    text = str(error).splitlines()[0]
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return LaunchError(f"MASTER_PORT {port} is in use on this host: set another, or end the process that uses it")
    if hosts_store:
        return LaunchError(f"MASTER_ADDR {address}, MASTER_PORT {port}: rank 0 cannot open its store there ({text})")
    return LaunchError(
        f"MASTER_ADDR {address}, MASTER_PORT {port}: the process that listens there is not rank 0 of a run ({text})"
    )
