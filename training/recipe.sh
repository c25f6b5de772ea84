# Sourced by the recipes, training/STEP/training_scripts/FAMILY/DEPLOYMENT/run_SIZE.sh. It defines
#   recipe DEFAULT_OUTPUT FLAG... "$@"
# which starts the step's main.py under deepspeed. DEPLOYMENT sets the devices: single_gpu is one,
# single_node is 8 of this machine, multi_node is 8 on each of $nodes nodes (set by the recipe): those listed in
# $HOSTFILE, or without it those of the Slurm job, whose srun then starts the ranks (training/slurm.sh).
# OUTPUT=DIR changes the output folder; flags on the command line override those of the recipe.
set -euo pipefail

recipe() {
    local deployment step launcher=(deepspeed)
    deployment=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)
    step=$(cd "$deployment/../../.." && pwd)
    case ${deployment##*/} in
        single_gpu) launcher+=(--num_gpus 1) ;;
        single_node) launcher+=(--num_gpus 8) ;;
        multi_node)
            if [[ -n ${SLURM_JOB_ID:-} && -z ${HOSTFILE:-} ]]; then
                slurm_launcher
            else
                : "${HOSTFILE:?set it to the file that lists the nodes, one per line: worker-1 slots=8}"
                launcher+=(--hostfile "$HOSTFILE" --num_nodes "${nodes:?set by the recipe}" --num_gpus 8)
            fi
            ;;
    esac
    "${launcher[@]}" "$step/main.py" --output_dir "${OUTPUT:-$1}" "${@:2}"
}

# Sets $launcher of recipe(). A rank that fails ends the others itself, and after a signal the ranks end one after the
# other: srun must not kill them.
slurm_launcher() {
    ((SLURM_JOB_NUM_NODES == nodes)) || {
        echo "recipe: this recipe is for $nodes nodes, and job $SLURM_JOB_ID has $SLURM_JOB_NUM_NODES: sbatch --nodes $nodes" >&2
        exit 2
    }
    launcher=(srun --nodes "$nodes" --ntasks-per-node 8 --cpus-per-task "${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 python)
}
