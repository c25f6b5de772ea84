# Sourced by the recipes, training/STEP/training_scripts/FAMILY/DEPLOYMENT/run_SIZE.sh. It defines
#   recipe DEFAULT_OUTPUT FLAG... "$@"
# which starts the step's main.py under deepspeed. DEPLOYMENT sets the devices: single_gpu is one,
# single_node is 8 of this machine, multi_node is 8 on each of $nodes nodes (set by the recipe) listed in $HOSTFILE.
# OUTPUT=DIR changes the output folder; flags on the command line override those of the recipe.
set -euo pipefail

recipe() {
    local deployment step launcher
    deployment=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)
    step=$(cd "$deployment/../../.." && pwd)
    case ${deployment##*/} in
        single_gpu) launcher=(--num_gpus 1) ;;
        single_node) launcher=(--num_gpus 8) ;;
        multi_node)
            : "${HOSTFILE:?set it to the file that lists the nodes, one per line: worker-1 slots=8}"
            launcher=(--hostfile "$HOSTFILE" --num_nodes "${nodes:?set by the recipe}" --num_gpus 8)
            ;;
    esac
    deepspeed "${launcher[@]}" "$step/main.py" --output_dir "${OUTPUT:-$1}" "${@:2}"
}
