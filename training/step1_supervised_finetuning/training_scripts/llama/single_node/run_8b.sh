#!/usr/bin/env bash
# Step 1, Llama-3.1-8B, one node of 8 x 80 GB.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"

recipe output/llama-3.1-8b/sft \
    --model_name_or_path meta-llama/Llama-3.1-8B \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_train_batch_size 8 --per_device_eval_batch_size 8 \
    --num_warmup_steps 10 --num_train_epochs 2 \
    --dtype bf16 --zero_stage 3 --gradient_checkpointing \
    "$@"
