"""Rank program: dynamic sampling: `python dynamic_ranks.py FOLDER`, with models and reward.py inside.

The first rank writes the minibatches of every case to FOLDER/dynamic.json; tests compare them with one process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rlhf_models import eval_rows, make_trainer

from dschat.arguments import RLHFSettings
from dschat.data.batches import GlobalBatches
from dschat.data.datasets import DataSplits
from dschat.distributed import collectives, launch
from dschat.rlhf.experience import MinibatchShuffle, MiniDataset
from dschat.rlhf.training_loop import PPORun

SIZE, SLOTS = 3, 8  # responses per prompt, prompts per iteration
QUESTIONS = [f"What is {i} plus {i * i}?" for i in range(20)]  # two iterations an epoch; the remainder is dropped
# The reward function decides by row number for which prompts all responses get the same score.
CASES: dict[str, dict[str, Any]] = {
    "a third": {"reward": "third", "dynamic_sampling": 3},
    "nearly all": {"reward": "most", "dynamic_sampling": 2},
    "all": {"reward": "all", "dynamic_sampling": 1},
    "none": {"reward": "none", "dynamic_sampling": 3},
    "normalised": {"reward": "third", "dynamic_sampling": 3, "normalize_rewards": True},
    "one batch": {"reward": "most", "dynamic_sampling": 4, "generation_batches": 1, "normalize_rewards": True},
    "off": {"reward": "third", "dynamic_sampling": 0},
}
REWARD = """
def score(flat, responses, rows):
    return [10.0 * row["number"] + (0 if flat(row["number"]) else sum(map(ord, text)) % 7)
            for text, row in zip(responses, rows)]
def third(prompts, responses, rows): return score(lambda number: number % 3 == 0, responses, rows)
def most(prompts, responses, rows): return score(lambda number: number % 8 != 3, responses, rows)
def all(prompts, responses, rows): return score(lambda number: True, responses, rows)
def none(prompts, responses, rows): return score(lambda number: False, responses, rows)
"""


def make_run(root: Path, case: str) -> PPORun:
    changes, ranks = dict(CASES[case]), collectives.world_size()
    batches = changes.pop("generation_batches", 2)
    changes["reward"] = [f"{root / 'reward.py'}:{changes['reward']}"]
    per_device = SLOTS // batches // ranks
    trainer = make_trainer(
        root, algorithm="dr_grpo", num_samples_per_prompt=SIZE, kl_coef=0.0, reward_clip=0.0, missing_eos_penalty=0.0,
        reward_model_name_or_path=None, per_device_generation_batch_size=per_device, generation_batches=batches,
        **changes,
    )  # fmt: skip
    shuffle = MinibatchShuffle(
        minibatch_size=SLOTS * SIZE // 2 // ranks, rank=collectives.rank(), world_size=ranks, seed=5, group_size=SIZE
    )
    dataset = MiniDataset(shuffle, generation_batches=batches, ppo_epochs=1, whiten_advantages=False)
    rows = eval_rows(trainer, QUESTIONS)
    return PPORun(
        trainer=trainer, dataset=dataset, prompts=DataSplits(train=rows, eval=rows.select([]), report=None),
        batches=GlobalBatches([1] * len(QUESTIONS), global_batch_size=SLOTS, seed=3, group_by_length=False),
        unsupervised=None, iterations=3, updates_per_iteration=2, settings=RLHFSettings(),
    )  # fmt: skip


def scenario(root: Path, case: str) -> dict[str, Any]:
    """Three iterations: (score, trained, advantage) of every row of all ranks, minibatch by minibatch."""
    run = make_run(root, case)
    result: dict[str, Any] = {"minibatches": [], "prompts_consumed": [], "samples": [], "sums": []}
    for number in range(3):
        iteration = run.collector.collect(number)
        for part in iteration.minibatches:
            rows = zip(part.scores.tolist(), part.trained.tolist(), part.advantages[:, 0].tolist(), strict=True)
            result["minibatches"].append(sorted(collectives.all_gather_lists([list(row) for row in rows])))
        result["prompts_consumed"].append(run.collector.prompts_consumed)
        result["samples"].append(collectives.all_gather_lists([[s["prompt"], s["score"]] for s in iteration.samples]))
        names = ("sequences", "trained", "flat_groups")
        totals = torch.stack([sum(sums[name] for sums in iteration.sums) for name in names])
        result["sums"].append(collectives.sum_over_ranks(totals).tolist())
    result["moments"] = run.trainer.rewards.state
    return result


if __name__ == "__main__":
    launch.join(seed=0)
    results = {case: scenario(Path(sys.argv[1]), case) for case in CASES}
    if collectives.is_main():
        Path(sys.argv[1], "dynamic.json").write_text(json.dumps(results), encoding="utf-8")
    collectives.barrier()
    dist.destroy_process_group()
