"""Runs math-verify in a process of its own: python -m dschat.rewards.math.verify_worker.

Reads JSON lines [given, wanted, decimals, CPU seconds] from standard input and writes one result line each: "1"
(equal), "0" (not equal), or "-" (limit exceeded). The kernel enforces the limits, as neither a signal handler nor a
thread can interrupt a power of large integers: it kills the comparing process, and a new one is forked in milliseconds
from a parent that has sympy loaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal

MEMORY = 1 << 30  # bytes that a process may allocate beyond its initial size
WALL_FACTOR = 20  # wall-clock seconds allowed per second of CPU time, for a loaded machine
FRESH_AFTER = 2000  # comparisons after which a process is replaced, as caches grow
OWNER_CHECK = 5.0  # seconds between checks that the owner is alive
CLOSED, RETIRED, OUT_OF_MEMORY = 10, 11, 12  # exit statuses of a comparing process

# Compared once before the first fork: imports math-verify and fills parser and sympy caches, which would take each
# new process a second.
TYPICAL = (
    ("(x+1)^2", "x^2+2x+1"), (r"\sqrt{12}", r"2\sqrt{3}"), (r"\frac{x^2-1}{x-1}", "x+1"), (r"\sin^2 x+\cos^2 x", "1"),
    (r"(1, 2]", "1 < x \\le 2"), (r"\{1, 2\}", "2, 1"), ("x=5", "5"), ("0.3", r"\frac{1}{3}"), (r"2^{10}", "1024"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"), (r"\frac{\pi}{2}", r"\pi"),
)  # fmt: skip


def main() -> None:
    """Fork a comparing process, and a new one whenever it has exited, until standard input is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # handled by the owner
    logging.disable(logging.CRITICAL)
    owner = os.getppid()
    for given, wanted in TYPICAL:
        equal(given, wanted, 6)
    requests, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b", buffering=0) as quiet:
        for stream in (0, 1, 2):
            os.dup2(quiet.fileno(), stream)
    os.write(answers, b"ready\n")
    while True:
        child = os.fork()
        if child == 0:
            serve(requests, answers, owner)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status < 0 or status == OUT_OF_MEMORY:  # below 0: killed by that signal
            os.write(answers, b"-\n")
        elif status != RETIRED:
            return


def serve(requests: int, answers: int, owner: int) -> None:
    """Process requests one by one; never returns."""
    status = 1  # unexpected error: the pipe is closed, which the owner detects
    try:
        limit_memory(MEMORY)
        for _ in range(FRESH_AFTER):
            request = read_request(requests, owner)
            if request is None:
                os._exit(CLOSED)
            *formulas, decimals, seconds = json.loads(request)
            limit_time(seconds)
            same = equal(*formulas, decimals)
            limit_time(0)
            os.write(answers, b"1\n" if same else b"0\n")
        status = RETIRED
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


def equal(given: str, wanted: str, decimals: int) -> bool:
    """Whether math-verify considers two formulas equal, irrational numbers rounded to `decimals`."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # Units were already removed by dschat.rewards.math.units: math-verify would also take the t of 5t for one.
    how = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    extraction = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=how)]
    try:
        # math-verify's own timeouts cannot interrupt long integer operations.
        target, gold = (
            parse(f"\\boxed{{{text}}}", extraction, parsing_timeout=None, raise_on_error=False)
            for text in (given, wanted)
        )
        return bool(verify(gold, target, float_rounding=decimals, timeout_seconds=None, raise_on_error=False))
    except RecursionError:
        return False


def limit_memory(beyond: int) -> None:
    """Limit memory to `beyond` bytes above current use, where the system supports it; disable core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # not every system has /proc or this limit
        with open("/proc/self/statm") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + beyond, used + beyond))


def limit_time(seconds: float) -> None:
    """Kill this process, by unhandled signals, after `seconds` more of CPU time; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WALL_FACTOR)


def read_request(requests: int, owner: int) -> bytes | None:
    """The next line; None if the pipe is closed or its owner has exited (its other children may keep the pipe open)."""
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([requests], [], [], OWNER_CHECK)[0]:
            try:
                os.kill(owner, 0)
            except ProcessLookupError:
                return None
            continue
        part = os.read(requests, 1 << 16)
        if not part:
            return None
        line += part
    return line


if __name__ == "__main__":
    main()
