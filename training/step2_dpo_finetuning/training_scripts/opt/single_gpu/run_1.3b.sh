#!/usr/bin/env bash
# DPO after step 1, OPT-1.3B, one 80 GB GPU.
# Flags on the command line win over those here.
set -euo pipefail
main=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)/main.py
output=${OUTPUT:-output/opt-1.3b/dpo}

deepspeed --num_gpus 1 "$main" \
    --model_name_or_path output/opt-1.3b/sft \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_train_batch_size 8 --per_device_eval_batch_size 8 --gradient_accumulation_steps 8 \
    --num_warmup_steps 10 \
    --dtype bf16 --gradient_checkpointing \
    --output_dir "$output" "$@"
