"""Places where a test may kill or disturb a run. Without DSCHAT_FAILPOINT in the environment they do nothing."""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "DSCHAT_FAILPOINT"
_met: Counter[str] = Counter()


def reached(name: str) -> bool:
    """Die here by SIGKILL if the environment says so: DSCHAT_FAILPOINT=NAME[@RANK][#N], at the N-th time (default 1).

    NAME:SIGNAL sends this signal instead (TERM, INT, STOP …), NAME:raise raises OSError(ENOSPC), and for NAME:nan the
    answer is True, and the caller spoils a number. Several are divided by commas.
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
