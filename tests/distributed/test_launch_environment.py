"""Rank detection from the environment variables of each launcher, and validation of these."""

import os
import subprocess
import sys

import pytest
from programs import MAINS

from dschat.distributed.launch_environment import LaunchError, first_host, is_first_of_node, launch_variables

TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1",
         "MASTER_PORT": "29501"}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29501"}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "node1",
         "MASTER_PORT": "29501"}  # fmt: skip
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
         "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "node[1-2]", "MASTER_PORT": "29501"}  # fmt: skip


@pytest.mark.parametrize("variables", [TORCH, OPEN_MPI, HYDRA, SLURM], ids=["torch", "openmpi", "hydra", "slurm"])
def test_every_launcher_gives_the_same_ranks(variables):
    assert launch_variables(variables) == TORCH


def test_srun_with_pmi_variables_uses_the_local_rank_of_slurm():
    assert launch_variables(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}) == TORCH


def test_mpirun_inside_a_slurm_job_takes_precedence():
    daemons = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    assert launch_variables(OPEN_MPI | daemons) == TORCH


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "nonsense"},  # set by a container image: ignored
        {"WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "PMIX_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"},
        {"SLURM_NTASKS": "8"},  # the shell of salloc is not a task
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    ],
)
def test_a_single_process_needs_no_launch_variables(variables):
    assert launch_variables(variables) == {}


def test_on_one_node_the_address_is_local_and_every_job_has_its_own_port():
    single_node = {name: value for name, value in OPEN_MPI.items() if not name.startswith("MASTER")}
    single_node |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    one = launch_variables(single_node | {"PMIX_NAMESPACE": "job-1"})
    other = launch_variables(single_node | {"PMIX_NAMESPACE": "job-2", "OMPI_COMM_WORLD_RANK": "0"})
    assert one["MASTER_ADDR"] == "127.0.0.1" and one["MASTER_PORT"] != other["MASTER_PORT"]
    assert launch_variables(single_node)["MASTER_PORT"] == "29500"
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7"}
    ports = [launch_variables(slurm | {"SLURM_STEP_ID": step})["MASTER_PORT"] for step in "001"]
    assert ports[0] == ports[1] != ports[2] and 10000 <= int(ports[0]) < 30000


def test_a_single_rank_needs_no_address_and_local_size_is_accepted():
    single = launch_variables({"RANK": "0", "WORLD_SIZE": "1"})
    assert single["LOCAL_RANK"] == "0" and single["LOCAL_WORLD_SIZE"] == "1"
    deepspeed = {name: value for name, value in TORCH.items() if name != "LOCAL_WORLD_SIZE"} | {"LOCAL_SIZE": "2"}
    assert launch_variables(deepspeed) == TORCH


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu1", "gpu1"),
        ("gpu[003-007,12],login", "gpu003"),
        ("a-[1,3]-ib[2-3],b", "a-1-ib2"),
        ("x,y[1-2]", "x"),
        ("", ""),
    ],
)
def test_first_host_of_a_slurm_node_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "change, message",
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE not set"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK not set"),
        ({"MASTER_ADDR": None, "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"RANK": None}, "WORLD_SIZE 4, LOCAL_RANK 1, but RANK is not set"),
        ({"RANK": ""}, "RANK not set"),
        ({"RANK": "zero"}, "RANK 'zero' is not a whole number"),
        ({"RANK": "1.0"}, "RANK '1.0' is not"),
        ({"RANK": "9" * 400}, "is not a whole number"),
        ({"RANK": "4"}, "RANK 4 must be from 0 to 3, as WORLD_SIZE is 4"),
        ({"RANK": "-1"}, "RANK -1 must be from 0 to 3"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE 0 must be"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE 'four'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK 2 must be from 0 to 1, as LOCAL_WORLD_SIZE is 2"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE 5 must be from 1 to 4"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT 70000 must be from 1 to 65535"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT 'http'"),
    ],
)
def test_an_invalid_variable_is_named_and_the_supported_launchers_are_listed(change, message):
    variables = {name: value for name, value in (TORCH | change).items() if value is not None}
    with pytest.raises(LaunchError) as caught:
        launch_variables(variables)
    assert message in str(caught.value) and "torchrun --nproc_per_node" in str(caught.value)


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"PMIX_RANK": "1"}, "PMIX_RANK 1, but RANK is not set"),
        ({name: value for name, value in OPEN_MPI.items() if name != "MASTER_ADDR"}, "mpirun -x MASTER_ADDR=HOST"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a"}, "MPI_LOCALRANKID or PMI_LOCAL_RANK is not set"),
        (SLURM | {"WORLD_SIZE": "8"}, "WORLD_SIZE 8, but Slurm started 4 processes"),
        (SLURM | {"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}, "use `srun python main.py ...`"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "7"}, "RANK 7 must be from 0 to 3"),
    ],
)
def test_incomplete_variables_of_other_launchers_are_refused(variables, message):
    with pytest.raises(LaunchError) as caught:
        launch_variables(variables)
    assert message in str(caught.value)


def test_local_rank_0_is_the_first_of_its_node():
    assert is_first_of_node({}) and is_first_of_node({"LOCAL_RANK": "0"}) and is_first_of_node({"LOCAL_RANK": "x"})
    assert not is_first_of_node({"LOCAL_RANK": "1"}) and not is_first_of_node({"SLURM_LOCALID": "2"})


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK 'x'"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE 2, LOCAL_RANK 1, but RANK is not set"),
    ],
)
def test_a_step_with_invalid_launch_variables_exits_with_status_2(variables, message, programs, tmp_path):
    printed = programs.run(MAINS["sft"], [], log=tmp_path / "log", code=2, environment=variables | {
        name: value for name, value in TORCH.items() if name not in ("RANK", "WORLD_SIZE")
    })  # fmt: skip
    assert printed.count(message) == 1 and "Traceback" not in printed


MPI_PROGRAM = """
from dschat.distributed import collectives
from dschat.distributed import launch
def main():
    launch.join(seed=1)
    print("ranks", collectives.all_gather_objects(collectives.rank()), flush=True)
launch.run(main)
"""


def test_two_processes_of_mpirun_join_one_run(tmp_path):
    """The processes get the variables that mpirun would set, and join one process group."""
    (tmp_path / "ranks.py").write_text(MPI_PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name not in TORCH}
    started = [
        subprocess.Popen(
            [sys.executable, tmp_path / "ranks.py"], stdout=subprocess.PIPE, text=True,
            env=environment | {
                "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "PMIX_NAMESPACE": f"test-{os.getpid()}",
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    printed = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert all("ranks [0, 1]" in text for text in printed)
