#!/usr/bin/env bash
# DPO after step 1, Qwen2.5-0.5B, one 80 GB GPU.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"

recipe output/qwen2.5-0.5b/dpo \
    --model_name_or_path output/qwen2.5-0.5b/sft \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_train_batch_size 16 --per_device_eval_batch_size 16 --gradient_accumulation_steps 4 \
    --learning_rate 2e-6 --num_warmup_steps 10 \
    --dtype bf16 --gradient_checkpointing \
    "$@"
