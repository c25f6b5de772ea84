"""Two-rank program for test_saving.py: `checkpoint_ranks.py FOLDER`, a run's output folder."""

import random
import sys
from pathlib import Path

import numpy as np
import torch

from dschat.checkpoints.loading import load_checkpoint
from dschat.checkpoints.saving import save_checkpoint
from dschat.checkpoints.selection import find_checkpoint
from dschat.distributed import collectives, launch

FOLDER = Path(sys.argv[1])


def draw() -> list[float]:
    return [random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def write_rank_file(folder: Path) -> None:
    (folder / f"of_rank_{collectives.rank()}.txt").write_text("x" * 100)


def main() -> None:
    launch.join(seed=1)
    launch.seed_all(collectives.rank())  # ranks may have different random states
    np.random.randn()  # leaves a second normal number cached
    first = save_checkpoint(FOLDER, 1, engines={}, state={"step": 1, "rows": 9}, keep=5, extra_writer=write_rank_file)
    expected = draw()
    save_checkpoint(FOLDER, 2, engines={}, state={"step": 2, "rows": 9}, keep=5)
    assert find_checkpoint(FOLDER, "auto") == FOLDER / "checkpoints" / "step-00000002"
    assert {path.name for path in first.iterdir()} >= {"of_rank_0.txt", "of_rank_1.txt"}
    assert load_checkpoint(first, engines={}, fingerprint={"rows": 9}) == {"step": 1, "rows": 9}
    assert draw() == expected
    assert collectives.all_gather_objects(expected)[0] != collectives.all_gather_objects(expected)[1]
    collectives.barrier()
    # The main rank detects the damage and broadcasts the result.
    if collectives.is_main():
        for path in FOLDER.glob("checkpoints/*/state.json"):
            path.write_text("{}")
    collectives.barrier()
    try:
        find_checkpoint(FOLDER, "auto")
    except ValueError as error:
        assert "none of the 2 checkpoints" in str(error)
    else:
        raise AssertionError("a damaged checkpoint was accepted")
    save_checkpoint(FOLDER, 3, engines={}, state={"step": 3}, keep=1)


if __name__ == "__main__":
    launch.run(main)
