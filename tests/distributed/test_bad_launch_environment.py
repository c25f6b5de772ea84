"""Invalid launcher variables are reported in one line that names them."""

from __future__ import annotations

import pytest

from dschat.distributed.launch_environment import LaunchError, launch_variables

VALID = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500"}  # fmt: skip
NUMERIC_VARIABLES = [name for name in VALID if name != "MASTER_ADDR"]
INVALID_NUMBERS = ["x", "1.5", "nan", "0x1", "-1", "99999999999", "9" * 5000, "1e3", "\u0663", "\u00b2", "1 2",
                   "1_0", "+", "--1", str(2**31)]  # fmt: skip
INVALID_HOSTS = ["a b", "http://x", "127.0.0.1:29500", "x" * 300, "..", "a\nb", "[::1]", "-"]
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODELIST": "a", "SLURM_STEP_ID": "0",
         "SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "h"}  # fmt: skip
CONTRADICTIONS = [
    (VALID | {"RANK": "2"}, "RANK 2"), (VALID | {"LOCAL_RANK": "2"}, "LOCAL_RANK 2"),
    (VALID | {"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE 3"), (VALID | {"WORLD_SIZE": "0"}, "WORLD_SIZE 0"),
    (VALID | {"RANK": "1", "WORLD_SIZE": "1"}, "RANK 1"), (VALID | {"MASTER_PORT": "0"}, "MASTER_PORT 0"),
    (VALID | {"MASTER_PORT": "65536"}, "MASTER_PORT 65536"), ({"WORLD_SIZE": "2"}, "RANK is not set"),
    ({"LOCAL_RANK": "1"}, "RANK is not set"), ({"WORLD_SIZE": "x"}, "RANK is not set"), ({"PMIX_RANK": "0"}, "PMIX"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK"), ({"RANK": "0"}, "WORLD_SIZE"), ({"RANK": ""}, "RANK"),
    *((SLURM | {name: value}, value or name) for name, values in {
        "SLURM_PROCID": ("x", "2", "-1"), "SLURM_NTASKS": ("x", "-2"), "SLURM_LOCALID": ("x", "-1", "9", ""),
    }.items() for value in values),
    *((OPEN_MPI | {name: value}, value) for name, values in {
        "OMPI_COMM_WORLD_RANK": ("x", "2", "-1"), "OMPI_COMM_WORLD_SIZE": ("x", "-2"),
        "OMPI_COMM_WORLD_LOCAL_RANK": ("x", "7"), "OMPI_COMM_WORLD_LOCAL_SIZE": ("x", "0"), "WORLD_SIZE": ("3",),
        "MASTER_ADDR": ("a b",),
    }.items() for value in values),
]  # fmt: skip


def error_of(environment: dict[str, str]) -> str:
    with pytest.raises(LaunchError) as caught:
        launch_variables(environment)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700, text
    return text


@pytest.mark.parametrize("value", INVALID_NUMBERS, ids=lambda text: ascii(text[:12]))
@pytest.mark.parametrize("name", NUMERIC_VARIABLES)
def test_an_invalid_number_is_refused(name, value):
    assert name in error_of(VALID | {name: value})


@pytest.mark.parametrize("name", [name for name in VALID if name != "LOCAL_WORLD_SIZE"])
def test_a_missing_or_empty_variable_is_refused(name):
    for environment in ({key: VALID[key] for key in VALID if key != name}, VALID | {name: ""}, VALID | {name: "  "}):
        assert name in error_of(environment)


@pytest.mark.parametrize("host", INVALID_HOSTS, ids=lambda text: repr(text[:20]))
def test_an_invalid_address_is_refused(host):
    assert "MASTER_ADDR" in error_of(VALID | {"MASTER_ADDR": host})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%eth0", "node-1", "gpu_003.cluster.local", "h"])
def test_valid_addresses_are_accepted(host):
    assert launch_variables(VALID | {"MASTER_ADDR": host})["MASTER_ADDR"] == host


@pytest.mark.parametrize(("environment", "part"), CONTRADICTIONS, ids=lambda value: str(value)[-40:])
def test_contradictory_variables_are_refused(environment, part):
    assert part in error_of(environment)


def test_a_slurm_task_list_of_a_billion_nodes_is_not_expanded():
    for tasks, expected in {"2(x99999999999)": "2", "2(x999999999),1": "2", "1,2": "1", "x": "2", "2(x": "2"}.items():
        assert launch_variables(SLURM | {"SLURM_TASKS_PER_NODE": tasks}).get("LOCAL_WORLD_SIZE") == expected
