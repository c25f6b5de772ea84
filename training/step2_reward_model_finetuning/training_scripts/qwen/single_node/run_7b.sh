#!/usr/bin/env bash
# Step 2, Qwen2.5-7B, one node of 8 x 80 GB.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"

recipe output/qwen2.5-7b/reward \
    --model_name_or_path Qwen/Qwen2.5-7B \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_train_batch_size 8 --per_device_eval_batch_size 8 \
    --learning_rate 5e-6 --num_warmup_steps 10 \
    --dtype bf16 --gradient_checkpointing \
    "$@"
