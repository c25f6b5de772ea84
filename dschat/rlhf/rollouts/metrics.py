"""Metrics of rollouts: sums over one rank's batches, and their means over all ranks."""

import math
from collections.abc import Sequence

import torch

from dschat.distributed.engines import Metrics, sum_metrics
from dschat.rlhf.rollouts.logprob_mismatch import mismatch_metrics
from dschat.rlhf.rollouts.result import RolloutResult
from dschat.rlhf.rollouts.score_shaping import flat_groups

COUNT = "count:"  # prefix of the number of responses that a source scored; no metric starts with it


def experience_sums(
    result: RolloutResult, weight: float = 1.0, *, judged: bool = False, group_size: int = 1
) -> Metrics:
    """Sums over sequences and tokens of one rank's rollout, which `experience_metrics` turns into means.

    Args:
        weight: 0 for rows of a rank that only takes part in the collectives.
        judged: whether there is a judge; some samples may lack its score.
        group_size: responses per prompt.
    """
    experience, samples = result.experience, result.samples
    mask = experience.response_mask
    sums = {
        "sequences": torch.tensor(len(experience)),
        "tokens": mask.sum(),
        "score": experience.scores[experience.has_score].sum(),
        "reward": experience.rewards[experience.has_score].sum(),
        "scored": experience.has_score.sum(),
        "ended_by_eos": experience.ended.sum(),
        "trained": experience.trained.sum(),
    }
    if experience.entropy is not None:
        sums["entropy"] = experience.entropy[mask].sum()
    if experience.kl is not None:
        sums["kl"] = experience.kl[mask].sum()
    if judged:
        sums |= _sum_and_count("judge", [sample["judge"] for sample in samples])
    for name in samples[0]["rewards"]:
        sums |= _sum_and_count(f"reward_{name}", [sample["rewards"][name] for sample in samples])
    if group_size > 1:
        sums["flat_groups"] = flat_groups(experience.scores, experience.has_score, group_size).sum() * group_size
    sums |= result.mismatch
    return {name: weight * value.to(mask.device, torch.float64) for name, value in sums.items()}


def _sum_and_count(name: str, values: Sequence[float | None]) -> Metrics:
    """Sum and number of the values that are not None."""
    present = [value for value in values if value is not None]
    return {name: torch.tensor(sum(present)), f"{COUNT}{name}": torch.tensor(len(present))}


def experience_metrics(sums: Sequence[Metrics]) -> dict[str, float]:
    """Means over all ranks and rollout batches. A collective.

    score and reward are per response that has a score; kl (nats), response_length (tokens), ended_by_eos and trained
    per response; judge and each source of --reward (reward_NAME) per response that they scored (their _missing counts
    the others), NaN if there is none, which is null in metrics.jsonl; entropy (nats) and the log-prob mismatch of the
    rollout engine, if measured (see logprob_mismatch.mismatch_metrics), are per token; flat_groups is the share of
    groups whose scores are all equal; responses is a count. trained and scored (share of responses that have a score)
    are left out where they are 1.
    """
    mismatch = mismatch_metrics(sums) if "rollout_logprob_mismatch_max" in sums[0] else {}
    total = sum_metrics({name: sum(part[name] for part in sums) for name in sums[0] if name not in mismatch})
    sequences, tokens = total.pop("sequences"), total.pop("tokens")
    means = {name: _mean(total.pop(name), total["scored"]) for name in ("score", "reward")}
    entropy = {"entropy": total.pop("entropy") / max(tokens, 1.0)} if "entropy" in total else {}
    by_source = {}
    for name in [name.removeprefix(COUNT) for name in total if name.startswith(COUNT)]:
        count = total.pop(f"{COUNT}{name}")
        by_source[name] = _mean(total.pop(name), count)
        if count < sequences:
            by_source[f"{name}_missing"] = sequences - count
    means |= {name: value / sequences for name, value in total.items()} | by_source
    for share in ("scored", "trained"):
        if means[share] == 1:
            del means[share]
    return means | {"response_length": tokens / sequences, **entropy, "responses": sequences} | mismatch


def _mean(total: float, count: float) -> float:
    """NaN without values."""
    return total / count if count else math.nan
