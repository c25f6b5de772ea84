"""Determine rank and world size from the variables of the launcher: deepspeed, torchrun, MPI, Slurm, or none."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from dschat.arguments.command_line import SettingsError
from dschat.arguments.yaml_config import format_value

HOW_TO_START = (
    "start the run with `deepspeed main.py ...`, `torchrun --nproc_per_node N main.py ...`, `srun python main.py ...` "
    "or `mpirun python main.py ...`; for one process, unset RANK, WORLD_SIZE and LOCAL_RANK and use "
    "`python main.py ...`"
)
DEFAULT_PORT = 29500  # as torchrun and deepspeed


class LaunchError(SettingsError):
    """The ranks cannot join.

    Attributes:
        on_this_rank: the error concerns this rank only, and no other rank reports it.
    """

    def __init__(self, message: str, *, on_this_rank: bool = False) -> None:
        super().__init__(message)
        self.on_this_rank = on_this_rank


@dataclass(frozen=True)
class Launcher:
    """Environment variables of a launcher other than torch's; of alternative names, the first that is set is used."""

    name: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    job: tuple[str, ...]


SLURM = Launcher(
    "Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_LOCALID",), (),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)  # fmt: skip
LAUNCHERS = (
    Launcher(
        "Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",), ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        "MVAPICH", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",), (),
    ),
    Launcher("PMI (MPICH, Intel MPI)", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
             ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), ()),
    SLURM,
)  # fmt: skip


def launch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; {} without a launcher.

    Variables of these names take precedence. If RANK is not set, those of MPI and Slurm are read; a launcher that
    started a single process is ignored.

    Raises:
        LaunchError: variables are missing, not numeric or contradictory; one message lists all of them.
    """
    if "RANK" in environment:
        return _validated(environment)
    launcher = _launcher(environment)
    if launcher is not None:
        return _validated(_from_launcher(launcher, environment))
    started_by_pmix = "PMIX_RANK" in environment and "SLURM_PROCID" not in environment
    partial = {name: environment[name] for name in ("WORLD_SIZE", "LOCAL_RANK") if name in environment}
    if started_by_pmix or partial.get("WORLD_SIZE", "1") != "1" or partial.get("LOCAL_RANK", "0") != "0":
        partial |= {"PMIX_RANK": environment["PMIX_RANK"]} if started_by_pmix else {}
        values = ", ".join(f"{name} {value}" for name, value in partial.items())
        raise LaunchError(
            f"{values}, but RANK is not set: every process would start a separate run; {HOW_TO_START}",
            on_this_rank=True,
        )
    return {}


def is_first_of_node(environment: Mapping[str, str]) -> bool:
    """Whether this process has local rank 0; True if the variables are unset or not numeric."""
    names = ["LOCAL_RANK", *(name for launcher in LAUNCHERS for name in launcher.local_rank)]
    local_rank = _first_set(environment, names, "0").strip()
    return local_rank in ("", "0") or not local_rank.isdigit()


def _launcher(environment: Mapping[str, str]) -> Launcher | None:
    """The MPI or Slurm launcher that started this process and others; None if there is none."""
    for launcher in LAUNCHERS:
        size = _first_set(environment, launcher.world_size)
        if launcher.rank not in environment or not size or size.strip() == "1":
            continue
        slurm = _first_set(environment, SLURM.world_size), environment.get(SLURM.rank)
        if launcher.rank == "PMI_RANK" and slurm == (size, environment["PMI_RANK"]):
            continue  # srun sets PMI variables too, but only Slurm's own include the local rank
        if launcher is SLURM and environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment:
            raise LaunchError(
                f"SLURM_NTASKS {size}, but this process was started by the batch script itself and is the only one: "
                "use `srun python main.py ...` in it, or set RANK=0 WORLD_SIZE=1 for one process"
            )
        return launcher
    return None


def _from_launcher(launcher: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    """Translate the variables of another launcher to those of torch; ones that the user has set take precedence."""
    size = _first_set(environment, launcher.world_size)
    if environment.get("WORLD_SIZE", size) != size:
        raise LaunchError(
            f"WORLD_SIZE {environment['WORLD_SIZE']}, but {launcher.name} started {size} processes "
            f"({launcher.world_size[0]}): unset WORLD_SIZE, or start as many"
        )
    local_rank = environment.get("LOCAL_RANK") or _first_set(environment, launcher.local_rank)
    local_size = environment.get("LOCAL_WORLD_SIZE") or _first_set(environment, launcher.local_world_size)
    if launcher is SLURM:
        local_size = local_size or _tasks_of_node(environment)
    address = environment.get("MASTER_ADDR") or _address(environment, one_node=local_size == size)
    translated = {
        "RANK": environment[launcher.rank], "WORLD_SIZE": size, "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size, "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or _port(launcher, environment),
    }  # fmt: skip
    if not translated["MASTER_ADDR"]:
        raise LaunchError(
            f"MASTER_ADDR is not set, and {launcher.name} does not provide the host of rank 0: set it to the name "
            "of that host for every rank, as in `mpirun -x MASTER_ADDR=HOST python main.py ...`"
        )
    if not local_rank:
        raise LaunchError(
            f"{launcher.rank} {environment[launcher.rank]}, but {' or '.join(launcher.local_rank)} is not set: set "
            "LOCAL_RANK, the number of the process on its node, for every rank"
        )
    return {name: value for name, value in translated.items() if value}


def _validated(environment: Mapping[str, str]) -> dict[str, str]:
    """Validate the variables: none missing, each number within its bounds."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: environment[name].strip() for name in names if environment.get(name, "").strip()}
    if "LOCAL_WORLD_SIZE" not in variables and environment.get("LOCAL_SIZE"):
        variables["LOCAL_WORLD_SIZE"] = environment["LOCAL_SIZE"]  # the deepspeed launcher's name for it
    if variables.get("WORLD_SIZE") == "1":  # no rendezvous needed
        variables = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(DEFAULT_PORT)} | variables
    if "WORLD_SIZE" in variables:
        variables.setdefault("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"])
    missing = [name for name in names if name not in variables and name != "LOCAL_WORLD_SIZE"]
    if missing:
        present = ", ".join(f"{name} {value}" for name, value in variables.items() if name != "LOCAL_WORLD_SIZE")
        raise LaunchError(
            f"{' and '.join(missing)} not set (only {present or 'an empty RANK'} is): {HOW_TO_START}",
            on_this_rank="RANK" in missing,
        )
    problems: list[str] = []
    world = _number(variables, "WORLD_SIZE", problems, least=1, most=2**31 - 1)
    ranks = problems.copy()
    local_world = _number(variables, "LOCAL_WORLD_SIZE", problems, least=1, most=world or 2**31 - 1)
    _number(variables, "RANK", ranks, least=0, most=world - 1 if world else None, of="WORLD_SIZE")
    last = local_world - 1 if local_world else None
    _number(variables, "LOCAL_RANK", ranks, least=0, most=last, of="LOCAL_WORLD_SIZE")
    _number(variables, "MASTER_PORT", problems, least=1, most=65535)
    if not _is_host(variables["MASTER_ADDR"]):
        address = format_value(repr(variables["MASTER_ADDR"]))
        problems.append(f"MASTER_ADDR {address} is not a host name or address (the port belongs into MASTER_PORT)")
    mistakes = dict.fromkeys(problems + ranks)
    if mistakes:
        raise LaunchError(f"{'; '.join(mistakes)}: {HOW_TO_START}", on_this_rank=len(ranks) > 0)
    return variables


def _number(
    variables: Mapping[str, str], name: str, problems: list[str], *, least: int, most: int | None, of: str = ""
) -> int | None:
    text = variables[name]
    if not re.fullmatch(r"[+-]?[0-9]{1,10}", text):
        problems.append(f"{name} {format_value(repr(text))} is not a whole number")
        return None
    value = int(text)
    if value < least or (most is not None and value > most):
        where = f", as {of} is {most + 1}" if of and most is not None else ""
        problems.append(f"{name} {value} must be from {least} to {most}{where}")
        return None
    return value


def _is_host(text: str) -> bool:
    """Whether the text can be a host name, or an IPv4 or IPv6 address."""
    return len(text) <= 253 and re.fullmatch(r"[\w][\w.-]*|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[\w%.]*", text) is not None


def _first_set(environment: Mapping[str, str], names: tuple[str, ...] | list[str], default: str = "") -> str:
    return next((environment[name] for name in names if environment.get(name)), default)


def _address(environment: Mapping[str, str], *, one_node: bool) -> str:
    """The host of rank 0; "" if it cannot be determined."""
    if one_node or _first_set(environment, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")) == "1":
        return "127.0.0.1"
    return first_host(_first_set(environment, ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")))


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: "gpu[003-007,12],login" → "gpu003"."""
    match = re.match(r"[^,\[]*(\[[^\]]*\][^,\[]*)*", nodes.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match.group()) if match else ""


def _tasks_of_node(environment: Mapping[str, str]) -> str:
    """Number of tasks on this node, from a Slurm list such as "2(x3),1"; "" if it cannot be determined."""
    tasks = _first_set(environment, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    node = environment.get("SLURM_NODEID", "0")
    index = int(node) if re.fullmatch(r"[0-9]{1,9}", node) else 0
    for number, times in re.findall(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", tasks):
        if index < int(times or 1):
            return number
        index -= int(times or 1)
    return ""


def _port(launcher: Launcher, environment: Mapping[str, str]) -> str:
    """A port derived from the job id: the same on all ranks, unlikely to be that of another job."""
    job = ".".join(environment[name] for name in launcher.job if environment.get(name))
    return str(10000 + zlib.crc32(job.encode()) % 20000) if job else str(DEFAULT_PORT)
