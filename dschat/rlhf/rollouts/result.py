"""The result of one rollout batch: experience, samples for the log, timings, log-prob mismatch."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from deepspeed.accelerator import get_accelerator

from dschat.distributed import failpoint, watchdog
from dschat.distributed.engines import Metrics
from dschat.rewards.weighted_sum import ResponseBatch, Scores, prompt_text
from dschat.rlhf.experience import Experience


class Timings(defaultdict[str, float]):
    """Seconds by phase: "rollout", "scoring", "update"."""

    def __init__(self, *timings: Timings) -> None:
        """Sum the given timings by phase."""
        super().__init__(float)
        for part in timings:
            for phase, seconds in part.items():
                self[phase] += seconds

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the duration of the block, device work included, to a phase; also sets the watchdog's phase."""
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
        experience: the training data; its advantages are None unless they were estimated.
        samples: prompt, response and scores of each response, for the log.
        timings: seconds by phase.
        mismatch: sums of the log-prob mismatch between rollout engine and policy, see
            logprob_mismatch.rollout_logprob_mismatch; {} with --old_logprobs rollout, where the first update
            measures it.
    """

    experience: Experience
    samples: list[dict[str, Any]]
    timings: Timings
    mismatch: Metrics = field(default_factory=dict)


def sample_records(
    batch: ResponseBatch, scores: Scores, *, row_index: Sequence[int], judge_scores: Sequence[float | None]
) -> list[dict[str, Any]]:
    """One JSON-serialisable record for each response: prompt, response, scores by source, and the judge's score.

    The score is None if there is none.

    Args:
        row_index: [B], the rows of the prompts in their data source.
        judge_scores: [B]; None where the judge gave no score, or there is no judge.
    """
    parts = {name: [None if x != x else x for x in part.tolist()] for name, part in scores.parts.items()}  # NaN: none
    return [
        {
            "prompt": prompt_text(batch.messages[i]),
            "response": batch.responses[i],
            "score": score if has_score else None,
            "rewards": {name: part[i] for name, part in parts.items()},
            "judge": judge_scores[i],
            "ended": batch.ended[i],
            "row_index": row_index[i],
        }
        for i, (score, has_score) in enumerate(zip(scores.total.tolist(), scores.has_score.tolist(), strict=True))
    ]
