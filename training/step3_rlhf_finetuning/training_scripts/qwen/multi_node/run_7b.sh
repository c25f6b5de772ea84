#!/usr/bin/env bash
# Step 3, Qwen2.5-7B actor, Qwen2.5-7B reward model and critic, 2 nodes of 8 x 80 GB.
# HOSTFILE names the file of the nodes; flags on the command line win over those here.
set -euo pipefail
: "${HOSTFILE:?name the file that lists the nodes, one a line: worker-1 slots=8}"
main=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)/main.py
output=${OUTPUT:-output/qwen2.5-7b/ppo}

deepspeed --hostfile "$HOSTFILE" --num_nodes 2 --num_gpus 8 "$main" \
    --actor_model_name_or_path output/qwen2.5-7b/sft \
    --reward_model_name_or_path output/qwen2.5-7b/reward \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_generation_batch_size 16 --per_device_training_batch_size 4 \
    --num_warmup_steps 20 --missing_eos_penalty 1 \
    --dtype bf16 --actor_zero_stage 3 --critic_zero_stage 3 --gradient_checkpointing \
    --output_dir "$output" "$@"
