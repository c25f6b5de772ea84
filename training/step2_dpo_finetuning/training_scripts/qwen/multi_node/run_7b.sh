#!/usr/bin/env bash
# DPO after step 1, Qwen2.5-7B, 2 nodes of 8 x 80 GB.
# HOSTFILE names the file of the nodes; flags on the command line win over those here.
set -euo pipefail
: "${HOSTFILE:?name the file that lists the nodes, one a line: worker-1 slots=8}"
main=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)/main.py
output=${OUTPUT:-output/qwen2.5-7b/dpo}

deepspeed --hostfile "$HOSTFILE" --num_nodes 2 --num_gpus 8 "$main" \
    --model_name_or_path output/qwen2.5-7b/sft \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_train_batch_size 4 --per_device_eval_batch_size 4 \
    --learning_rate 5e-7 --num_warmup_steps 10 \
    --dtype bf16 --gradient_checkpointing \
    --output_dir "$output" "$@"
