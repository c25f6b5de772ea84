"""Join the processes of a run: any launcher or plain `python`, on CUDA or CPU, through one code path."""

import gc
import os
import random
import shutil
import sys
import sysconfig
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch import distributed as dist

from dschat.arguments.command_line import SettingsError
from dschat.distributed import groups, termination, watchdog
from dschat.distributed.build_locks import clear_stale_build_locks
from dschat.distributed.collectives import barrier, is_main_of_node, rank, world_size
from dschat.distributed.launch_environment import LaunchError, launch_variables
from dschat.distributed.library_output import quiet_libraries
from dschat.distributed.rendezvous import open_store
from dschat.distributed.terminal import printable

# The watchdog ends runs that hang; a collective may wait for hours, for example for a rank that prepares data.
PROCESS_GROUP_TIMEOUT = timedelta(days=7)


def run(main: Callable[[], None]) -> None:
    """Run a step's main; a SettingsError prints one message per node instead of a traceback per rank.

    A rank that fails prints why, and the watchdog ends the other ranks. The process group is destroyed only if all
    ranks finish: otherwise that could deadlock with ranks in another collective.
    """
    try:
        with termination.exit_on_signals():
            os.environ.update(launch_variables(os.environ))
            quiet_libraries()
            gc.freeze()  # modules: DeepSpeed collects garbage a dozen times per engine, 0.3 s each with them
            main()
            watchdog.phase("end")
            barrier()
    except SettingsError as mistakes:
        if is_main_of_node() or (isinstance(mistakes, LaunchError) and mistakes.on_this_rank):
            print(printable(mistakes), file=sys.stderr, flush=True)  # files may differ between nodes
        _fail(str(mistakes), 2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        _fail("interrupted", 130)
    except SystemExit as error:
        watchdog.fail(f"it exited with status {error.code}", error.code if isinstance(error.code, int) else 1)
        raise
    except Exception as error:
        if world_size() == 1:
            raise
        traceback.print_exc()
        sys.stderr.flush()
        earlier = watchdog.fail("".join(traceback.format_exception_only(error)).strip(), 1)
        if earlier:
            print(f"rank {rank()}: before that, {earlier}", file=sys.stderr, flush=True)
        sys.exit(1)
    watchdog.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


def _fail(problem: str, status: int) -> NoReturn:
    watchdog.fail(problem, status)
    sys.exit(status)


def join(
    *, seed: int, collective_timeout: float = 1800.0, rendezvous_timeout: float = 600.0, deterministic: bool = False
) -> torch.device:
    """Join the process group (of size 1 under plain `python`), set the number of threads, seed all generators.

    All ranks get the same seed, so that initial weights agree; afterwards the steps seed ranks apart for dropout.
    Other random numbers of training are seeded by position in the data, not by rank.

    Args:
        deterministic: use deterministic algorithms where torch has them.
        collective_timeout: seconds after which the run ends if a rank is unresponsive, or no rank makes progress.
        rendezvous_timeout: seconds to wait for missing ranks at the start.

    Returns: this rank's device.
    Raises: SettingsError if the build tools for DeepSpeed's CPU ops are missing; LaunchError if the launcher's
        variables are missing or wrong, or ranks do not join.
    """
    single_process = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    os.environ.update(launch_variables(os.environ) or single_process)
    local_rank = int(os.environ["LOCAL_RANK"])
    accelerator = get_accelerator()
    _use_own_build_folder()
    if accelerator.device_name() == "cpu":
        _check_build_tools()
        builds = os.environ.get("TORCH_EXTENSIONS_DIR")
        if builds and local_rank == 0:
            clear_stale_build_locks(Path(builds))
        _set_threads()
        device = torch.device("cpu")
    else:
        _check_device(local_rank, accelerator.device_count())
        accelerator.set_device(local_rank)
        device = torch.device(accelerator.device_name(local_rank))
    if not dist.is_initialized():
        _open_group(device, rendezvous_timeout)
    groups.create_groups()
    watchdog.start(collective_timeout)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is initialised, later
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
    seed_all(seed)
    return device


def _open_group(device: torch.device, rendezvous_timeout: float) -> None:
    """Rendezvous with the other ranks and create the process group, which DeepSpeed adopts."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # any free port; MASTER_PORT is ignored
        os.environ["MASTER_PORT"] = str(store.port)
    else:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = open_store(rank, size, address=address, port=port, seconds=rendezvous_timeout)
    backend = "gloo" if device.type == "cpu" else get_accelerator().communication_backend_name()
    # As in DeepSpeed: with a device_id NCCL connects eagerly, which a single rank does not need.
    eager = {"device_id": device} if device.type == "cuda" and size > 1 else {}
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PROCESS_GROUP_TIMEOUT, **eager)
    deepspeed.init_distributed(dist_backend=backend, timeout=PROCESS_GROUP_TIMEOUT, verbose=False)


def _check_device(local_rank: int, devices: int) -> None:
    if local_rank >= devices:
        raise LaunchError(
            f"LOCAL_RANK {local_rank}, but this process has {devices} device{'s' if devices != 1 else ''}: start "
            "as many processes on a node as it has devices, and let each of them see all (no --gpus-per-task, no "
            "CUDA_VISIBLE_DEVICES of its own)",
            on_this_rank=True,
        )


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch (of all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _check_build_tools() -> None:
    missing = [tool for tool in ("g++", "ninja") if not shutil.which(tool)]
    if missing and not os.environ.get("CXX"):
        raise SettingsError(
            f"DeepSpeed builds its CPU operations when first used and needs {' and '.join(missing)}: "
            "install them (Debian: apt-get install g++; ninja also comes with `pip install ninja`)"
        )


def _use_own_build_folder() -> None:
    """Build ops in the virtual environment, with its own ninja, even if it is not activated.

    Two environments, or two versions of ninja, that share a build folder would invalidate each other's builds and
    recompile for a minute at every start.
    """
    scripts = sysconfig.get_path("scripts")
    if os.path.exists(os.path.join(scripts, "ninja")):
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    builds = Path(sys.prefix, "torch_extensions")
    is_own = not builds.exists() or builds.stat().st_uid == os.getuid()  # else torch's default, in this user's home
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK) and is_own:
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(builds))


def _set_threads() -> None:
    """Set the threads per rank to the node's cores divided by its ranks, unless OMP_NUM_THREADS is set."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or os.environ["WORLD_SIZE"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # torchrun itself sets OMP_NUM_THREADS=1 when it starts several ranks: not the user's choice.
    omp_threads = os.environ.get("OMP_NUM_THREADS")
    if omp_threads is None or ("TORCHELASTIC_RUN_ID" in os.environ and omp_threads == "1"):
        torch.set_num_threads(max(1, cores // ranks))
