"""Every comparison of formulas runs under a memory limit of the kernel."""

import os
import resource
import sys
from pathlib import Path

import pytest

from dschat.rewards import worker_loop
from dschat.rewards.math.verify_process import Comparison, math_verify_process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_AS")


def test_the_comparing_process_has_a_memory_limit():
    process = math_verify_process()
    try:
        assert process.results([Comparison("(x+1)^2", "x^2+2x+1")]) == [True]
        program = process._process.pid
        (child,) = Path(f"/proc/{program}/task/{program}/children").read_text().split()
        limit, _ = resource.prlimit(int(child), resource.RLIMIT_AS)
        assert worker_loop.MEMORY < limit < 8 * worker_loop.MEMORY
    finally:
        process.close()


def test_memory_beyond_the_limit_is_an_error():
    child = os.fork()
    if child == 0:
        worker_loop._limit_memory(64 << 20)
        try:
            bytearray(256 << 20)
        except MemoryError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
