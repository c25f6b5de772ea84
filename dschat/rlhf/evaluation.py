"""Evaluation on held-out prompts: means over all ranks, and metrics over several responses to one prompt."""

from typing import Any

import torch
from datasets import Dataset

from dschat.data.batches import rank_share
from dschat.data.collators import collate_prompts
from dschat.distributed import collectives, groups
from dschat.rlhf.answer_metrics import answer_metrics
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.rlhf.rollouts.metrics import experience_metrics, experience_sums

# Every evaluation uses the same random numbers, so that results differ by the actor and not by sampling noise.
EVALUATION_ITERATION = 2**31 - 1


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
        local_indices = share or indices[:1]  # a rank without rows takes part in the collectives
        prompts = collate_prompts([rows[index] for index in local_indices])
        result = trainer.rollout_and_score(prompts, iteration=EVALUATION_ITERATION, sample_ids=local_indices, samples=n)
        sums.append(experience_sums(result, 1.0 if share else 0.0, judged=trainer.judge is not None))
        samples += result.samples if share else []
    if not sums:
        return {}, []
    samples = collectives.gather_lists_to_main(samples)
    metrics = experience_metrics(sums)
    if n > 1:
        by_prompt = [samples[first : first + n] for first in range(0, len(samples), n)]
        # Only the main rank has all samples, and every rank needs the metrics.
        grouped = answer_metrics(by_prompt, success=success_score, extraction=answer) if collectives.is_main() else {}
        metrics |= collectives.broadcast_from_main(grouped)
    return metrics, samples
