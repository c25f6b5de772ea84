"""Rank program: evaluation, an iteration of PPO and the EMA: `python rlhf_ranks.py FOLDER STAGES`.

On several ranks the first one writes the results to FOLDER/<stage>.pt; tests compare them with one process.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rlhf_models import QUESTIONS, eval_rows, make_trainer, one_iteration

from dschat.distributed import collectives, launch
from dschat.models.weights import full_weights
from dschat.rlhf.evaluation import evaluate


def number_of(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """A judge with a different score for every row."""
    return [2.0 ** row["number"] for row in rows]


def scenario(root: Path, stage: int) -> dict[str, Any]:
    """Global batches are the same for 1 and 2 ranks."""
    ranks = collectives.world_size()
    trainer = make_trainer(
        root, actor_zero_stage=stage, critic_zero_stage=stage, judge=number_of, enable_ema=True, ema_decay=0.5,
        per_device_generation_batch_size=4 // ranks, per_device_training_batch_size=2 // ranks,
        gradient_accumulation_steps=2, max_grad_norm=0.3, clip_range=0.02,
    )  # fmt: skip
    engine, result = trainer.engine, {}
    rows = eval_rows(trainer, QUESTIONS[:7])
    for size in (1, 2):  # 7 rows on 2 ranks: in the last batch one rank has no row with size 1, and one fewer with 2
        metrics, samples = evaluate(trainer, rows, batch_size=size, max_batches=0)
        answers = {sample["prompt"]: sample["response"] for sample in samples}  # of every rank
        result[f"evaluation {size}"] = metrics, answers, len(samples)
    _, samples = evaluate(trainer, rows, batch_size=4 // ranks, max_batches=1)
    result["one batch on each device"] = len(samples)
    _, result["updates"] = one_iteration(trainer, QUESTIONS, minibatch_size=4 // ranks, ppo_epochs=2)
    defaults = trainer.ppo, trainer.rollouts
    # The decoder's log-probs of a truncated distribution: a mismatch larger than rounding.
    trainer.ppo, trainer.rollouts = replace(defaults[0], old_logprobs="rollout"), replace(defaults[1], top_k=4)
    _, result["updates with rollout log-probs"] = one_iteration(
        trainer, QUESTIONS, minibatch_size=4 // ranks, ppo_epochs=1
    )
    trainer.ppo, trainer.rollouts = defaults
    if collectives.is_main():
        (root / f"ema-{stage}-{ranks}").mkdir()
    collectives.barrier()
    engine.save_shadow_models(root / f"ema-{stage}-{ranks}")
    models = {"actor": engine.policy, "critic": engine.critic, "ref": engine.ref, "reward": engine.reward,
              "average": engine.actor_ema}  # fmt: skip
    for name, module in models.items():
        result[name] = {key: tensor.detach().clone() for key, tensor in full_weights(module)}
    engine.update_ema(0.0)
    result["average with decay 0"] = {key: tensor.detach().clone() for key, tensor in full_weights(engine.actor_ema)}
    collectives.barrier()
    engine.load_shadow_models(root / f"ema-{stage}-{ranks}")
    result["reloaded average"] = {key: tensor.detach().clone() for key, tensor in full_weights(engine.actor_ema)}
    return result


if __name__ == "__main__":
    launch.join(seed=0)
    for stage in map(int, sys.argv[2:]):
        results = scenario(Path(sys.argv[1]), stage)
        if collectives.is_main():
            torch.save(results, Path(sys.argv[1], f"{stage}.pt"))
    collectives.barrier()
    dist.destroy_process_group()
