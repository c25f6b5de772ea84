"""Rank program: scores and normalises two rollouts, written as JSON: reward_ranks.py FOLDER.

The first call of a function ends the run if it fails on all ranks, not on one of several.
"""

import json
import sys
from pathlib import Path

import torch

from dschat.distributed import collectives, launch
from dschat.generation import Rollout
from dschat.rewards.retry import NoScores
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
        own_scores = batch[collectives.rank() * len(batch) // size : (collectives.rank() + 1) * len(batch) // size]
        count = len(own_scores)
        ids = torch.zeros(count, 2, dtype=torch.long)
        rollout = Rollout(ids, ids > 0, ids[:, 1:] > 0, torch.zeros(count, 1), torch.ones(count) > 0)
        chats = [[{"role": "user", "content": "a"}]] * count
        answers = ResponseBatch(chats, ["b"] * count, [[1]] * count, [{"x": x} for x in own_scores], [True] * count, 1)
        totals = collectives.all_gather_lists(rewards.score(rollout, answers).total.tolist())
    check_first_call(folder, rollout, answers)
    if collectives.is_main():
        (folder / f"{size}.json").write_text(json.dumps({"state": rewards.state, "totals": totals}))


def check_first_call(folder: Path, rollout: Rollout, answers: ResponseBatch) -> None:
    """A function that raises on the last rank alone, and one that raises on every rank."""
    last = collectives.rank() == collectives.world_size() - 1 > 0
    for name, raises in (("some", last), ("all", True)):
        file = folder / f"{name}-{collectives.rank()}-{collectives.world_size()}.py"
        file.write_text(f"def reward(responses):\n    assert not {raises}\n    return [1.0] * len(responses)\n")
        rewards = Rewards([parse_reward(f"{file}:reward")], normalize=False)
        try:
            rewards.score(rollout, answers)
            ended = False
        except NoScores:
            ended = True
        assert ended == (name == "all"), name


if __name__ == "__main__":
    launch.run(main)
