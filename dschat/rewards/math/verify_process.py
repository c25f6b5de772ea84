"""The process in which math-verify compares formulas."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

from dschat.rewards.worker_process import TimeLimits, WorkerProcess

INSTALL = "pip install -r requirements.txt"
LIMITS = TimeLimits(seconds=2.0, budget=20.0, short_seconds=0.3)  # 10 to 50 ms are usual


class Comparison(NamedTuple):
    """Two formulas, and the number of decimals for comparing irrational numbers with decimals."""

    answer: str
    reference: str
    decimals: int = 6


def require_math_verify() -> None:
    """Raise ImportError if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(f"the package math-verify is not installed: {INSTALL} installs it")


def math_verify_process(limits: TimeLimits = LIMITS) -> WorkerProcess:
    """A process whose results for `Comparison`s are True (equal) or False; None where a limit was exceeded."""
    return WorkerProcess("dschat.rewards.math.verify_worker", limits=limits, package="math-verify", install=INSTALL)
