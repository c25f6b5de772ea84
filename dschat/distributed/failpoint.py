"""Failpoints, at which tests inject kills and errors; no-ops unless DSCHAT_FAILPOINT is set in the environment."""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "DSCHAT_FAILPOINT"
_calls: Counter[str] = Counter()


def reached(name: str) -> bool:
    """Trigger a failpoint: DSCHAT_FAILPOINT=NAME[@RANK][#N] kills this process by SIGKILL at the N-th call (default 1).

    NAME:SIGNAL sends another signal (TERM, INT, STOP …), NAME:raise raises OSError(ENOSPC), and for NAME:nan this
    returns True, and the caller injects a NaN. Several are separated by commas.
    """
    return any([_reached(name, entry) for entry in os.environ.get(VARIABLE, "").split(",") if entry])


def _reached(name: str, entry: str) -> bool:
    point, _, times = entry.partition("#")
    point, _, rank = point.partition("@")
    point, _, action = point.partition(":")
    if point != name or (rank and rank != os.environ.get("RANK", "0")):
        return False
    _calls[entry] += 1
    if _calls[entry] != int(times or 1):
        return False
    if action == "nan":
        return True
    if action == "raise":
        raise OSError(28, f"failpoint {name}")
    os.kill(os.getpid(), getattr(signal, f"SIG{action or 'KILL'}"))
    return False
