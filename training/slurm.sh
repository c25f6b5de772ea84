#!/usr/bin/env bash
# Runs a recipe of several nodes under Slurm, one task a GPU. From the repository's root:
#   sbatch --nodes 4 training/slurm.sh [RECIPE [FLAG...]]
# RECIPE is a training/STEP/training_scripts/FAMILY/multi_node/run_SIZE.sh; the job needs as many nodes as it names.
# The environment is $VENV, or .venv in the repository, on a file system that all nodes share. Before its time is up
# Slurm sends SIGUSR1: the run saves and exits with status 75, and the job is queued again and resumes.
#SBATCH --job-name=dschat
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
# --gpus-per-task is not used, since each rank must see all devices of its node. Slurm runs a copy of this file, so the
# repository is where sbatch was called.
cd "${SLURM_SUBMIT_DIR:?start it with sbatch, from the root of the repository}"
recipe=${1:-training/step3_rlhf_finetuning/training_scripts/llama/multi_node/run_70b.sh}
[[ -f training/recipe.sh && -f $recipe ]] || { echo "slurm: $recipe is not a recipe below $PWD: name one, and call sbatch in the root of the repository" >&2; exit 2; }
export PATH="${VENV:-$PWD/.venv}/bin:$PATH"
unset HOSTFILE # it would choose the deepspeed launcher

status=0
bash "$recipe" --resume auto --save_minutes 30 "${@:2}" || status=$?
if ((status == 75)); then
    echo "slurm: the run has saved; the job is queued again and resumes" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
