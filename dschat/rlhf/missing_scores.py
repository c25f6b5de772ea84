"""Ends a run whose reward sources give no scores any more."""

from __future__ import annotations

from collections.abc import Mapping

from dschat.arguments.secrets import redacted


class RewardsUnavailable(SystemExit):
    """No response got a score for too many iterations; the reason has been logged."""

    def __init__(self) -> None:
        super().__init__(1)


class MissingScores:
    """Counts consecutive iterations without any score. Ranks agree, since the metrics are equal on all of them.

    An iteration in which every group has equal scores has scores, so it is not counted.

    Args:
        limit: number of such iterations after which the run ends (--max_bad_steps); 0: no limit.
        sources: name of each reward source in the metrics → its --reward entry.

    Attributes:
        iterations: number of consecutive iterations without any score, up to the newest.
    """

    def __init__(self, *, limit: int, sources: Mapping[str, str]) -> None:
        self.limit, self.sources, self.iterations = limit, dict(sources), 0

    def check_metrics(self, metrics: Mapping[str, float]) -> str | None:
        """Count an iteration by its metrics; returns the reason to end the run, or None.

        Args:
            metrics: of experience_metrics; `scored` is left out if every response has a score.
        """
        self.iterations = 0 if metrics.get("scored", 1.0) else self.iterations + 1
        if not 0 < self.limit <= self.iterations:
            return None
        missing = {name: metrics.get(f"reward_{name}_missing", 0.0) for name in self.sources}
        most_missing = max(missing.values())
        entries = " and ".join(redacted(self.sources[name]) for name, count in missing.items() if count == most_missing)
        return (
            f"no response of the last {self.iterations} iterations got a score (--max_bad_steps {self.limit}): "
            f"--reward {entries} gave none"
        )
