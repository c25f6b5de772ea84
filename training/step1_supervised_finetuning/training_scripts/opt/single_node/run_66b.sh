#!/usr/bin/env bash
# Step 1, OPT-66b, one node of 8 x 80 GB: adapters only.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"

recipe output/opt-66b/sft \
    --model_name_or_path facebook/opt-66b \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 2 \
    --num_warmup_steps 10 --num_train_epochs 2 \
    --lora_dim 64 --only_optimize_lora --lora_learning_rate 2e-4 \
    --dtype bf16 --zero_stage 3 --gradient_checkpointing \
    "$@"
