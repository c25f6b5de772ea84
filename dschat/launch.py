"""Joining the processes of a run: `deepspeed`, `torchrun` or plain `python`, on CUDA or CPU, through one code path."""

import os
import random
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch import distributed as dist

from dschat import watchdog
from dschat.build_locks import clear_stale_build_locks
from dschat.command_line import SettingsError
from dschat.terminal import printable


def run(main: Callable[[], None]) -> None:
    """Run a step's main; a mistake in the settings is one message from each node, not a stack from each rank."""
    try:
        main()
    except SettingsError as mistakes:
        if is_main_of_node():  # nodes may differ, in the files they see
            print(printable(mistakes), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        watchdog.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


def join(*, seed: int, collective_timeout: float = 1800.0, deterministic: bool = False) -> torch.device:
    """Join the process group (a group of one under plain `python`), share the cores, seed every generator.

    All ranks get the same seed, for weights that are drawn alike; once these exist, the steps seed each rank apart for
    dropout. What training draws besides is drawn by position, not by rank.

    Args:
        deterministic: take only operations that give the same bits every time, where there are some.
        collective_timeout: seconds after which a rank that is silent, or stays in one phase, ends the run.

    Returns: this rank's device.
    Raises: SettingsError when the tools that DeepSpeed builds its CPU operations with are missing.
    """
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        os.environ.update(alone | {"MASTER_PORT": str(_free_port())})
    local_rank = int(os.environ["LOCAL_RANK"])
    accelerator = get_accelerator()
    _keep_builds_apart()
    if accelerator.device_name() == "cpu":
        _check_build_tools()
        builds = os.environ.get("TORCH_EXTENSIONS_DIR")
        if builds and local_rank == 0:
            clear_stale_build_locks(Path(builds))
        _share_cores()
        device = torch.device("cpu")
    else:
        accelerator.set_device(local_rank)
        device = torch.device(accelerator.device_name(local_rank))
    if not dist.is_initialized():
        backend = accelerator.communication_backend_name()
        deepspeed.init_distributed(
            dist_backend="gloo" if accelerator.device_name() == "cpu" else backend,
            timeout=timedelta(seconds=2 * collective_timeout + 60),  # the watchdog knows more, so it speaks first
            verbose=False,
        )
    watchdog.start(collective_timeout)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts, which is later
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
    seed_all(seed)
    return device


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (those of every device too)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """True on the one rank that writes files and speaks."""
    return rank() == 0


def is_main_of_node() -> bool:
    """True on one rank of each node."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def from_all_ranks(value: Any) -> list[Any]:
    """The value of every rank, in their order."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def joined_lists(values: list[Any]) -> list[Any]:
    """The entries of every rank's list in one list, rank after rank."""
    return [value for of_rank in from_all_ranks(values) for value in of_rank]


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all ranks, in float64; the argument is left as it was."""
    total = value.detach().to(torch.float64, copy=True)
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def max_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The largest of a tensor's entries over all ranks, entry by entry, in float64; the argument is left as it was."""
    largest = value.detach().to(torch.float64, copy=True)
    if world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


@contextmanager
def local_main_first() -> Iterator[None]:
    """The first process of every node runs the block before the others: it prepares files that they then reuse."""
    first = is_main_of_node()
    if not first:
        barrier()
    try:
        yield
    finally:
        if first:
            barrier()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _check_build_tools() -> None:
    missing = [tool for tool in ("g++", "ninja") if not shutil.which(tool)]
    if missing and not os.environ.get("CXX"):
        raise SettingsError(
            f"DeepSpeed builds its CPU operations when first used and needs {' and '.join(missing)}: "
            "install them (Debian: apt-get install g++; ninja also comes with `pip install ninja`)"
        )


def _keep_builds_apart() -> None:
    """Build operations into the virtual environment, with its own ninja, also when it is not activated.

    Two environments that share torch's default folder, or two versions of ninja that share a folder, each find the
    other's build outdated and compile for a minute at every start.
    """
    scripts = sysconfig.get_path("scripts")
    if os.path.exists(os.path.join(scripts, "ninja")):
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    builds = Path(sys.prefix, "torch_extensions")
    mine = not builds.exists() or builds.stat().st_uid == os.getuid()  # else torch's own folder, in this user's home
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK) and mine:
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(builds))


def _share_cores() -> None:
    """Threads per rank: the node's cores divided by its ranks, unless OMP_NUM_THREADS says otherwise."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or os.environ["WORLD_SIZE"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # torchrun sets OMP_NUM_THREADS=1 by itself when it starts several ranks: not a user's choice.
    chosen = os.environ.get("OMP_NUM_THREADS")
    if chosen is None or ("TORCHELASTIC_RUN_ID" in os.environ and chosen == "1"):
        torch.set_num_threads(max(1, cores // ranks))
