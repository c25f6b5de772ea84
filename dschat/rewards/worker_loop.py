"""Request loop of a worker process (see worker_process), with limits of CPU time and memory for each request.

Reads JSON lines [CPU seconds, request] from standard input and writes a line with the JSON result for each, or null
where a limit was exceeded. The kernel enforces the limits, as neither a signal handler nor a thread can interrupt a
power of large integers: it kills the computing process, and a new one is forked in milliseconds from a parent that has
the packages loaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
from collections.abc import Callable
from typing import Any

MEMORY = 1 << 30  # bytes that a process may allocate beyond its initial size
WALL_FACTOR = 20  # wall-clock seconds allowed per second of CPU time, for a loaded machine
REQUESTS_PER_PROCESS = 2000  # requests after which a process is replaced, as caches grow
OWNER_CHECK_INTERVAL = 5.0  # seconds between checks that the owner is alive
CLOSED, RETIRED, OUT_OF_MEMORY = 10, 11, 12  # exit statuses of a computing process

Compute = Callable[[Any], Any]  # request → result, both JSON-serialisable; the result is not None


def serve(compute: Compute, *, prepare: Callable[[Any], None] = lambda request: None) -> None:
    """Fork a computing process, and a new one whenever it has exited, until standard input is closed.

    Import what `compute` needs before: a forked process has it at once.

    Args:
        prepare: called with each request before its time limit starts.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # handled by the owner
    logging.disable(logging.CRITICAL)
    owner = os.getppid()
    requests, results = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b", buffering=0) as devnull:
        for stream in (0, 1, 2):
            os.dup2(devnull.fileno(), stream)
    os.write(results, b"ready\n")
    while True:
        child = os.fork()
        if child == 0:
            _compute_requests(compute, prepare, requests=requests, results=results, owner=owner)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status < 0 or status == OUT_OF_MEMORY:  # below 0: killed by that signal
            os.write(results, b"null\n")
        elif status != RETIRED:
            return


def _compute_requests(
    compute: Compute, prepare: Callable[[Any], None], *, requests: int, results: int, owner: int
) -> None:
    """Process requests one by one; never returns."""
    status = 1  # unexpected error: the pipe is closed, which the owner detects
    try:
        _limit_memory(MEMORY)
        for _ in range(REQUESTS_PER_PROCESS):
            line = _read_line(requests, owner)
            if line is None:
                os._exit(CLOSED)
            seconds, request = json.loads(line)
            prepare(request)
            _limit_time(seconds)
            result = compute(request)
            _limit_time(0)
            os.write(results, json.dumps(result).encode() + b"\n")
        status = RETIRED
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


def _limit_memory(extra: int) -> None:
    """Limit memory to `extra` bytes above current use, where the system supports it; disable core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # not every system has /proc or this limit
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))


def _limit_time(seconds: float) -> None:
    """Kill this process, by unhandled signals, after `seconds` more of CPU time; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WALL_FACTOR)


def _read_line(requests: int, owner: int) -> bytes | None:
    """The next line; None if the pipe is closed or its owner has exited (its other children may keep the pipe open)."""
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([requests], [], [], OWNER_CHECK_INTERVAL)[0]:
            try:
                os.kill(owner, 0)
            except ProcessLookupError:
                return None
            continue
        data = os.read(requests, 1 << 16)
        if not data:
            return None
        line += data
    return line
