"""Metrics of rollouts: means over all ranks, in training and on held-out prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset

from dschat.data.batches import rank_share
from dschat.data.collators import collate_prompts
from dschat.distributed import collectives, groups
from dschat.distributed.engines import Metrics, sum_metrics
from dschat.rewards.answer_extraction import extract_answer
from dschat.rlhf.pass_at_k import majority, pass_at_k
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.rlhf.rollout_correction import mismatch_metrics
from dschat.rlhf.rollout_result import RolloutResult
from dschat.rlhf.score_shaping import flat_groups

# Every evaluation uses the same random numbers, so that results differ by the actor and not by sampling noise.
EVALUATION = 2**31 - 1


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
        "entropy": experience.entropy[mask].sum(),
        "ended_by_eos": experience.ended.sum(),
        "trained": experience.trained.sum(),
    }
    if experience.kl is not None:
        sums["kl"] = experience.kl[mask].sum()
    if judged:
        sums |= _known("judge", [sample["judge"] for sample in samples])
    for name in samples[0]["rewards"]:
        sums |= _known(f"reward_{name}", [sample["rewards"][name] for sample in samples])
    if group_size > 1:
        sums["flat_groups"] = flat_groups(experience.scores, experience.has_score, group_size).sum() * group_size
    sums |= result.mismatch
    return {name: weight * value.to(mask.device, torch.float64) for name, value in sums.items()}


def _known(name: str, values: Sequence[float | None]) -> Metrics:
    """Sum and count of the values that are not None."""
    known = [value for value in values if value is not None]
    return {name: torch.tensor(sum(known)), f"{name}_known": torch.tensor(len(known))}


def experience_metrics(sums: Sequence[Metrics]) -> dict[str, float]:
    """Means over all ranks and rollout batches. A collective.

    score and reward are per response that has a score; kl (nats), response_length (tokens), ended_by_eos and trained
    per response; judge and each source of --reward (reward_NAME) per response that they scored (their _missing counts
    the others); entropy (nats) and the log-prob mismatch of the rollout engine, if measured (see
    rollout_correction.mismatch_metrics), are per token; flat_groups is the share of groups whose scores are all equal;
    responses is a count.
    """
    mismatch = mismatch_metrics(sums) if "rollout_logprob_mismatch_max" in sums[0] else {}
    total = sum_metrics({name: sum(part[name] for part in sums) for name in sums[0] if name not in mismatch})
    sequences, tokens = total.pop("sequences"), total.pop("tokens")
    entropy = total.pop("entropy") / max(tokens, 1.0)
    scored = max(total.pop("scored"), 1.0)
    worth = {name: total.pop(name) / scored for name in ("score", "reward")}
    opinions = {}
    for name in [name.removesuffix("_known") for name in total if name.endswith("_known")]:
        known = total.pop(f"{name}_known")
        opinions[name] = total.pop(name) / max(known, 1.0)
        if known < sequences:
            opinions[f"{name}_missing"] = sequences - known
    means = worth | {name: value / sequences for name, value in total.items()} | opinions
    if means["trained"] == 1:
        del means["trained"]
    return means | {"response_length": tokens / sequences, "entropy": entropy, "responses": sequences} | mismatch


@torch.no_grad()
def evaluate(
    trainer: DeepSpeedPPOTrainer,
    rows: Dataset,
    *,
    batch_size: int,
    max_batches: int,
    num_samples: int = 1,
    success_score: float = 1.0,
    answer: str = "last_number",
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics over held-out prompts, and on the main rank the samples of all ranks. ({}, []) without rows.

    Args:
        batch_size: prompts per device and rollout.
        max_batches: rollouts per device; 0: all prompts.
        num_samples: responses per prompt; above 1, answer_metrics are added.
        success_score, answer: when a response is correct, and how its answer is extracted (see answer_metrics).
    """
    size, n = batch_size * groups.data_parallel_size(), num_samples
    starts = range(0, len(rows), size)[: max_batches or None]
    sums, samples = [], []
    for start in starts:
        indices = range(start, min(start + size, len(rows)))
        share = rank_share(
            indices, rank=groups.data_parallel_rank(), world_size=groups.data_parallel_size(),
            micro_batch_size=batch_size,
        )[0]  # fmt: skip
        mine = share or indices[:1]  # a rank without rows takes part in the collectives
        prompts = collate_prompts([rows[index] for index in mine])
        result = trainer.rollout_and_score(prompts, iteration=EVALUATION, sample_ids=mine, samples=n)
        sums.append(experience_sums(result, 1.0 if share else 0.0, judged=trainer.judge is not None))
        samples += result.samples if share else []
    if not sums:
        return {}, []
    samples = collectives.gather_lists_to_main(samples)
    metrics = experience_metrics(sums)
    if n > 1:
        by_prompt = [samples[first : first + n] for first in range(0, len(samples), n)]
        # Only the main rank has all samples, and every rank needs the metrics.
        found = answer_metrics(by_prompt, success=success_score, how=answer) if collectives.is_main() else {}
        metrics |= collectives.broadcast_from_main(found)
    return metrics, samples


def answer_metrics(groups: Sequence[Sequence[dict[str, Any]]], *, success: float, how: str) -> dict[str, float]:
    """mean@n (share of correct responses), pass@k for k = 2, 4, … n, and maj@n, over groups of n samples per prompt.

    Args:
        success: a response is correct if its score is at least this.
        how: how the answer is extracted from a response (see extract_answer), for the majority vote.
    """
    n = len(groups[0])
    right = [[sample["score"] >= success for sample in group] for group in groups]
    ks = sorted({2**power for power in range(1, n.bit_length()) if 2**power <= n} | {n})
    found = {f"mean@{n}": sum(map(sum, right)) / (n * len(groups))}
    for k in ks:
        found[f"pass@{k}"] = sum(pass_at_k(n, sum(group), k) for group in right) / len(groups)
    votes = [majority([extract_answer(sample["response"], how) for sample in group]) for group in groups]
    found[f"maj@{n}"] = sum(vote is not None and group[vote] for vote, group in zip(votes, right, strict=True)) / len(
        groups
    )
    return found
