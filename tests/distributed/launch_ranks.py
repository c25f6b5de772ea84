"""Multi-rank program for test_launch.py: `launch_ranks.py CASE FOLDER`."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from dschat.arguments.command_line import raise_mistakes
from dschat.distributed import collectives, launch

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])


def together() -> None:
    before = collectives.rank(), collectives.world_size()  # of a process that has not joined yet
    device = launch.join(seed=5)
    rank, size = collectives.rank(), collectives.world_size()
    assert before == (0, 1) and size == 2 and collectives.is_main() == (rank == 0)
    assert device.type in ("cpu", "cuda")
    drawn = collectives.all_gather_objects(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]  # one seed for all
    mine = torch.tensor([1.5, 2.0 * rank])
    total = collectives.sum_over_ranks(mine)
    assert total.tolist() == [3.0, 2.0] and total.dtype == torch.float64
    assert mine.tolist() == [1.5, 2.0 * rank] and mine.dtype == torch.float32
    largest = collectives.max_over_ranks(torch.tensor([[-3.0 - rank, 2.0 * rank]]))
    assert largest.tolist() == [[-3.0, 2.0]] and largest.dtype == torch.float64
    # 2^24 + 1 is no float32: sums of counts are exact all the same.
    assert collectives.sum_over_ranks(torch.tensor([2**24 + rank])).item() == 2**25 + 1
    assert collectives.all_gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}]


def main_first() -> None:
    launch.join(seed=5)
    with collectives.main_of_node_first():
        if collectives.is_main():
            time.sleep(0.3)
            (FOLDER / "prepared").touch()
        assert (FOLDER / "prepared").exists()
    try:
        with collectives.main_of_node_first():
            if collectives.is_main():
                raise KeyError("the first one fails")
    except KeyError:
        assert collectives.is_main()  # and the other rank continued


def mistake() -> None:
    launch.join(seed=5)
    raise_mistakes(["--shade green: choose another"])


def fault() -> None:
    launch.join(seed=5)
    raise KeyError("a fault of ours")


def fault_of_one() -> None:
    """Rank 1 fails while rank 0 runs unrelated code and rank 2 waits for both."""
    launch.join(seed=5)
    collectives.barrier()
    if collectives.rank() == 1:
        raise KeyError("a fault of ours")
    while collectives.rank() == 0:
        time.sleep(0.1)
    collectives.barrier()


def mistake_of_one() -> None:
    launch.join(seed=5)
    if collectives.rank() == 1:
        raise_mistakes(["--shade green: choose another"])
    collectives.barrier()


def terminated() -> None:
    """A signal to one rank before the training loop, which would capture it, has started."""
    launch.join(seed=5)
    collectives.barrier()
    if collectives.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    while True:
        time.sleep(0.1)


def gathered() -> None:
    """Collectives that gather to the main rank only, and broadcasts from it."""
    launch.join(seed=5)
    found = collectives.gather_lists_to_main([{"rank": collectives.rank()}] * (collectives.rank() + 1))
    assert found == ([{"rank": 0}, {"rank": 1}, {"rank": 1}] if collectives.is_main() else [])
    assert collectives.broadcast_from_main(f"from {collectives.rank()}") == "from 0"


if __name__ == "__main__":
    cases = (together, main_first, mistake, fault, fault_of_one, mistake_of_one, terminated, gathered)
    launch.run({case.__name__: case for case in cases}[CASE])
