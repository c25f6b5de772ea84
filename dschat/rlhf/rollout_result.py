"""What one rollout batch made: nothing of it is left on the trainer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from deepspeed.accelerator import get_accelerator

from dschat.distributed import failpoint, watchdog
from dschat.distributed.engines import Metrics
from dschat.rlhf.experience import Experience


class Timings(defaultdict[str, float]):
    """Seconds by phase: "rollout", "scoring", "update"."""

    def __init__(self, *timings: Timings) -> None:
        """The sums of these timings."""
        super().__init__(float)
        for part in timings:
            for phase, seconds in part.items():
                self[phase] += seconds

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block, those of the device's work included, to a phase; the watchdog is told of it."""
        watchdog.phase(phase)
        failpoint.reached(phase)
        start = time.perf_counter()
        yield
        get_accelerator().synchronize()
        self[phase] += time.perf_counter() - start


@dataclass
class RolloutResult:
    """One rollout batch of this rank.

    Attributes:
        experience: what the updates learn from; advantages are 0 where none were asked for.
        samples: prompt, response and scores of each response, for people to read.
        timings: seconds by phase.
        mismatch: sums of the difference between the log-probs of rollout engine and policy, see
            rollout_correction.rollout_logprob_mismatch; {} with --old_logprobs rollout, whose first update measures it.
    """

    experience: Experience
    samples: list[dict[str, Any]]
    timings: Timings
    mismatch: Metrics = field(default_factory=dict)
