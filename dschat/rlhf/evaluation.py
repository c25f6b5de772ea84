"""What is said of rollouts: means over all ranks, in training and on held-out prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset

from dschat import launch
from dschat.data.batches import rank_share
from dschat.data.collators import collate_prompts
from dschat.engines import Metrics, sum_metrics
from dschat.rlhf.experience import Experience
from dschat.rlhf.off_policy import gap_metrics, rollout_gap
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer

# Evaluations draw the same uniform numbers every time, so that they differ by the actor and not by luck.
EVALUATION = 2**31 - 1


def experience_sums(
    experience: Experience,
    samples: Sequence[dict[str, Any]],
    weight: float = 1.0,
    *,
    recomputed: bool = True,
    judged: bool = False,
) -> Metrics:
    """Sums over sequences and tokens of one rank's rollout, which `experience_metrics` makes means of.

    Args:
        samples: of the trainer, for the judge's scores.
        weight: 0 for rows that only keep a rank busy.
        recomputed: whether old_logprobs are the actor's own; the decoder's say nothing of the gap between the two,
            which the trainer's first update then measures.
        judged: whether there is a judge; it may have left out some samples.
    """
    mask = experience.response_mask
    sums = {
        "sequences": torch.tensor(len(experience)),
        "tokens": mask.sum(),
        "score": experience.scores.sum(),
        "reward": experience.rewards.sum(),
        "kl": experience.kl[mask].sum(),
        "entropy": experience.entropy[mask].sum(),
        "ended_by_eos": experience.ended.sum(),
    }
    if recomputed:
        sums |= rollout_gap(experience.old_logprobs, experience.rollout_logprobs, mask)
    if judged:
        scores = [sample["judge"] for sample in samples if sample["judge"] is not None]
        sums |= {"judge": torch.tensor(sum(scores)), "judged": torch.tensor(len(scores))}
    return {name: weight * value.to(mask.device, torch.float64) for name, value in sums.items()}


def experience_metrics(sums: Sequence[Metrics]) -> dict[str, float]:
    """Means over all ranks and rollout batches. A collective.

    score, reward, kl (nats), response_length (tokens) and ended_by_eos are per response, judge per response that the
    judge scored (judge_missing counts the others); entropy (nats) and the
    gap between decoder and actor, where it is known (see off_policy.gap_metrics), are per token.
    """
    gap = gap_metrics(sums) if "rollout_gap_max" in sums[0] else {}
    total = sum_metrics({name: sum(part[name] for part in sums) for name in sums[0] if name not in gap})
    sequences, tokens = total.pop("sequences"), total.pop("tokens")
    entropy = total.pop("entropy") / max(tokens, 1.0)
    judged = {}
    if "judge" in total:
        scored = total.pop("judged")
        judged = {"judge": total.pop("judge") / max(scored, 1.0)}
        judged |= {"judge_missing": sequences - scored} if scored < sequences else {}
    means = {name: value / sequences for name, value in total.items()} | judged
    return means | {"response_length": tokens / sequences, "entropy": entropy} | gap


def evaluate(
    trainer: DeepSpeedPPOTrainer, rows: Dataset, *, batch_size: int, max_batches: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics over held-out prompts, one sampled response each, and the samples. ({}, []) without rows.

    Args:
        batch_size: prompts per device and rollout.
        max_batches: rollouts per device; 0: all prompts.
    """
    size = batch_size * launch.world_size()
    starts = range(0, len(rows), size)[: max_batches or None]
    sums, samples = [], []
    for start in starts:
        indices = range(start, min(start + size, len(rows)))
        share = rank_share(indices, rank=launch.rank(), world_size=launch.world_size(), micro_batch_size=batch_size)[0]
        mine = share or indices[:1]  # a rank without rows joins in
        prompts = collate_prompts([rows[index] for index in mine])
        experience = trainer.generate_experience(prompts, iteration=EVALUATION, sample_ids=mine)
        recomputed = trainer.ppo.old_logprobs == "recompute"
        sums.append(experience_sums(experience, trainer.samples, 1.0 if share else 0.0, recomputed=recomputed,
                                    judged=trainer.judge is not None))  # fmt: skip
        samples += trainer.samples if share else []
    trainer.take_seconds()
    return (experience_metrics(sums) if sums else {}), launch.joined_lists(samples)
