#!/usr/bin/env bash
# Step 1, Qwen2.5-1.5B, one 80 GB GPU.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"

recipe output/qwen2.5-1.5b/sft \
    --model_name_or_path Qwen/Qwen2.5-1.5B \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_train_batch_size 16 --per_device_eval_batch_size 16 --gradient_accumulation_steps 4 \
    --num_warmup_steps 10 --num_train_epochs 2 \
    --dtype bf16 --gradient_checkpointing \
    "$@"
