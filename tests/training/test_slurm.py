"""training/slurm.sh: srun starts a recipe's program on every GPU, and a run that has saved is queued again."""

import os
import re
import subprocess

import pytest
from repository import ROOT
from shell_commands import commands_of

SCRIPT = ROOT / "training" / "slurm.sh"
MULTI_NODE = sorted(ROOT.glob("training/*/training_scripts/*/multi_node/run_*.sh"))
JOB = "export HOSTFILE= SLURM_JOB_ID=7 SLURM_CPUS_PER_TASK=8 SLURM_SUBMIT_DIR=$PWD SLURM_JOB_NUM_NODES={nodes}\n"


def nodes_of(recipe) -> int:
    return int(re.search(r"^nodes=(\d+)$", recipe.read_text(), re.MULTILINE)[1])


@pytest.mark.parametrize("recipe", MULTI_NODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_recipe_of_several_nodes_runs_under_srun_with_the_same_flags(recipe, tmp_path):
    name = recipe.relative_to(ROOT)
    plain = commands_of(f"bash {name}", folder=tmp_path)[0]
    (command,) = commands_of(
        JOB.format(nodes=nodes_of(recipe)) + f"bash training/slurm.sh {name} --seed 5", folder=tmp_path
    )
    assert (command.program, command.processes, command.nodes) == (plain.program, plain.processes, plain.nodes)
    changed = {"resume": "auto", "save_minutes": 30.0, "seed": 5}
    assert command.flags() == plain.flags() | changed


def test_the_default_is_step_3_on_the_nodes_that_the_script_requests(tmp_path):
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SCRIPT.read_text(), re.MULTILINE))
    (command,) = commands_of(JOB.format(nodes=directives["nodes"]) + "bash training/slurm.sh", folder=tmp_path)
    assert command.step == "step3_rlhf_finetuning" and command.nodes == int(directives["nodes"]) > 1
    assert command.processes == command.nodes * int(directives["ntasks-per-node"])
    assert directives["gpus-per-node"] == directives["ntasks-per-node"]
    assert not {"gpus-per-task", "gpu-bind"} & directives.keys()  # each rank must see all devices of its node


def run_with_srun(folder, *, status: int, nodes: int = 4) -> tuple[subprocess.CompletedProcess, str]:
    """The script where srun ends with a status; and the arguments that scontrol got."""
    (folder / "bin").mkdir()
    for name, line in {"srun": f"exit {status}", "scontrol": f'echo "$@" >{folder}/requeued'}.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / "bin" / name).chmod(0o755)
    environment = os.environ | {
        "VENV": str(folder), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_SUBMIT_DIR": str(ROOT),
        "HOSTFILE": "ignored",
    }  # fmt: skip
    done = subprocess.run(["bash", SCRIPT], cwd=folder, env=environment, capture_output=True, text=True)
    requeued = folder / "requeued"
    return done, requeued.read_text() if requeued.exists() else ""


@pytest.mark.parametrize("status", [0, 1, 75, 137])
def test_only_a_run_that_has_saved_is_queued_again(status, tmp_path):
    done, requeued = run_with_srun(tmp_path, status=status)
    assert done.returncode == status, done.stderr
    assert requeued == ("requeue 7\n" if status == 75 else "")


def test_a_job_with_another_number_of_nodes_is_refused(tmp_path):
    done, _ = run_with_srun(tmp_path, status=0, nodes=2)
    assert done.returncode == 2
    assert "this recipe is for 4 nodes, and job 7 has 2: sbatch --nodes 4" in done.stderr


def test_outside_the_repository_the_message_names_the_recipe(tmp_path):
    environment = os.environ | {"SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "call sbatch in the root of the repository" in done.stderr
