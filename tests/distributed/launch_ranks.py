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


def collectives_of_two() -> None:
    unjoined = collectives.rank(), collectives.world_size()  # before the process joins
    device = launch.join(seed=5)
    rank, size = collectives.rank(), collectives.world_size()
    assert unjoined == (0, 1) and size == 2 and collectives.is_main() == (rank == 0)
    assert device.type in ("cpu", "cuda")
    drawn = collectives.all_gather_objects(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]  # the same seed on all ranks
    value = torch.tensor([1.5, 2.0 * rank])
    total = collectives.sum_over_ranks(value)
    assert total.tolist() == [3.0, 2.0] and total.dtype == torch.float64
    assert value.tolist() == [1.5, 2.0 * rank] and value.dtype == torch.float32
    largest = collectives.max_over_ranks(torch.tensor([[-3.0 - rank, 2.0 * rank]]))
    assert largest.tolist() == [[-3.0, 2.0]] and largest.dtype == torch.float64
    # float32 cannot represent 2^24 + 1: sums of counts are exact nevertheless.
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


def settings_error() -> None:
    launch.join(seed=5)
    raise_mistakes(["--shade green: choose another"])


def internal_error() -> None:
    launch.join(seed=5)
    raise KeyError("an internal error")


def internal_error_of_one() -> None:
    """Rank 1 fails while rank 0 runs unrelated code and rank 2 waits for both."""
    launch.join(seed=5)
    collectives.barrier()
    if collectives.rank() == 1:
        raise KeyError("an internal error")
    while collectives.rank() == 0:
        time.sleep(0.1)
    collectives.barrier()


def settings_error_of_one() -> None:
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


def gather_and_broadcast() -> None:
    """Collectives that gather to the main rank only, and broadcasts from it."""
    launch.join(seed=5)
    lists = collectives.gather_lists_to_main([{"rank": collectives.rank()}] * (collectives.rank() + 1))
    assert lists == ([{"rank": 0}, {"rank": 1}, {"rank": 1}] if collectives.is_main() else [])
    assert collectives.broadcast_from_main(f"from {collectives.rank()}") == "from 0"


if __name__ == "__main__":
    cases = (
        collectives_of_two, main_first, settings_error, internal_error, internal_error_of_one, settings_error_of_one,
        terminated, gather_and_broadcast,
    )  # fmt: skip
    launch.run({case.__name__: case for case in cases}[CASE])
