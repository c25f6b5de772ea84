"""Rank program: scores and normalises two rollouts, written as JSON: reward_ranks.py FOLDER."""

import json
import sys
from pathlib import Path

import torch

from dschat.distributed import collectives, launch
from dschat.generation import Rollout
from dschat.rewards.weighted_sum import ResponseBatch, Rewards, parse_reward

SCORES = [[1.0, 5.0, -2.0, 7.5, 0.0, 3.0], [100.0, 90.0, 95.0, 103.0, 70.0, 91.0]]
FUNCTION = "def column(rows):\n    return [row['x'] for row in rows]\n"


def main() -> None:
    launch.join(seed=0)
    folder, size = Path(sys.argv[1]), collectives.world_size()
    file = folder / "column.py"
    if collectives.is_main():
        file.write_text(FUNCTION)
    collectives.barrier()
    rewards = Rewards([parse_reward(f"{file}:column")], normalize=True)
    for batch in SCORES:
        mine = batch[collectives.rank() * len(batch) // size : (collectives.rank() + 1) * len(batch) // size]
        count = len(mine)
        some = torch.zeros(count, 2, dtype=torch.long)
        rollout = Rollout(some, some > 0, some[:, 1:] > 0, torch.zeros(count, 1), torch.ones(count) > 0)
        chats = [[{"role": "user", "content": "a"}]] * count
        answers = ResponseBatch(chats, ["b"] * count, [[1]] * count, [{"x": x} for x in mine], [True] * count, 1)
        totals = collectives.all_gather_lists(rewards.score(rollout, answers).total.tolist())
    if collectives.is_main():
        (folder / f"{size}.json").write_text(json.dumps({"state": rewards.state, "totals": totals}))


if __name__ == "__main__":
    launch.run(main)
