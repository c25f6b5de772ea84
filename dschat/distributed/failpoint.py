"""Failpoints, at which tests inject kills and errors; no-ops unless DSCHAT_FAILPOINT is set in the environment."""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "DSCHAT_FAILPOINT"
_met: Counter[str] = Counter()


def reached(name: str) -> bool:
    """Trigger a failpoint: DSCHAT_FAILPOINT=NAME[@RANK][#N] kills this process by SIGKILL at the N-th call (default 1).

    NAME:SIGNAL sends another signal (TERM, INT, STOP …), NAME:raise raises OSError(ENOSPC), and for NAME:nan this
    returns True, and the caller injects a NaN. Several are separated by commas.
    """
    return any([_reached(name, wanted) for wanted in os.environ.get(VARIABLE, "").split(",") if wanted])


def _reached(name: str, wanted: str) -> bool:
    place, _, times = wanted.partition("#")
    place, _, rank = place.partition("@")
    place, _, what = place.partition(":")
    if place != name or (rank and rank != os.environ.get("RANK", "0")):
        return False
    _met[wanted] += 1
    if _met[wanted] != int(times or 1):
        return False
    if what == "nan":
        return True
    if what == "raise":
        raise OSError(28, f"failpoint {name}")
    os.kill(os.getpid(), getattr(signal, f"SIG{what or 'KILL'}"))
    return False
