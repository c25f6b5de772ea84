"""Rank program: two iterations of every algorithm, and an evaluation: `python algorithm_ranks.py FOLDER`.

The first rank writes the results to FOLDER/algorithms.pt; tests compare them with one process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rlhf_models import QUESTIONS, eval_rows, make_trainer, one_iteration

from dschat.distributed import collectives, launch
from dschat.models.weights import full_weights
from dschat.rlhf.evaluation import evaluate

# Algorithm, ZeRO stage and accumulation on two ranks, further flags: each loss and estimator at least once.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ppo": (3, 2, {"dual_clip": 1.5, "entropy_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3+"}),
    "grpo": (2, 2, {"ref_refresh_interval": 1}),
    "dr_grpo": (3, 1, {"kl_coef": 0.1, "ref_refresh_interval": 1, "mask_truncated": True}),
    "rloo": (0, 2, {"policy_loss": "gspo", "clip_range": 0.005, "loss_aggregation": "seq_mean_token_mean"}),
    "reinforce++": (2, 1, {"policy_loss": "cispo", "clip_range": 0.02}),
    "reinforce++_baseline": (3, 2, {"policy_loss": "sapo", "normalize_rewards": True, "mask_truncated": True}),
    "remax": (0, 1, {"rollout_correction": "tis", "rollout_correction_cap": 1.0, "top_k": 20}),
    "opo": (2, 1, {"rollout_correction": "seq_mis", "overlong_buffer": 3, "top_k": 100, "kl_in": "loss"}),
}


def scenario(root: Path, algorithm: str) -> dict[str, Any]:
    """Global batches are the same for 1 and 2 ranks."""
    ranks = collectives.world_size()
    stage, accumulation, changes = CASES[algorithm]
    stage, accumulation = (stage, accumulation) if ranks > 1 else (0, 1)
    settings = {
        "algorithm": algorithm, "num_samples_per_prompt": 2, "actor_zero_stage": stage, "critic_zero_stage": stage,
        "gradient_accumulation_steps": accumulation, "per_device_generation_batch_size": 4 // ranks,
        "per_device_training_batch_size": 8 // ranks // accumulation, "actor_learning_rate": 3e-4,
        "max_grad_norm": 0.3, "clip_range": 0.02,
    }  # fmt: skip
    trainer = make_trainer(root, **settings | changes)
    result: dict[str, Any] = {"updates": [], "trained": []}
    for _ in range(2):
        parts, updates = one_iteration(trainer, QUESTIONS, minibatch_size=8 // ranks, ppo_epochs=2)
        result["updates"] += updates
        result["trained"] += [float(collectives.sum_over_ranks(part.trained.sum())) for part in parts]
        if trainer.ppo.ref_refresh_interval:
            trainer.engine.refresh_reference()
    if algorithm == "grpo":  # 7 rows in batches of 4: on 2 ranks, one rank has a row less in the last batch
        rows = eval_rows(trainer, QUESTIONS[:7])
        result["evaluation"], samples = evaluate(
            trainer, rows, batch_size=4 // ranks, max_batches=0, num_samples=3, success_score=0.2, answer="text"
        )
        result["answers"] = sorted((sample["prompt"], sample["response"]) for sample in samples)
    models = {"actor": trainer.engine.policy, "critic": trainer.engine.critic, "ref": trainer.engine.ref}
    for name, engine in models.items():
        if engine is not None:
            result[name] = {key: tensor.detach().clone() for key, tensor in full_weights(engine)}
    return result


if __name__ == "__main__":
    launch.join(seed=0)
    results = {algorithm: scenario(Path(sys.argv[1]), algorithm) for algorithm in CASES}
    if collectives.is_main():
        torch.save(results, Path(sys.argv[1], "algorithms.pt"))
    collectives.barrier()
    dist.destroy_process_group()
