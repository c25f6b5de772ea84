#!/usr/bin/env bash
# Step 1, OPT-6.7b, one 80 GB GPU: adapters only.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"

recipe output/opt-6.7b/sft \
    --model_name_or_path facebook/opt-6.7b \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_train_batch_size 8 --per_device_eval_batch_size 8 --gradient_accumulation_steps 8 \
    --num_warmup_steps 10 --num_train_epochs 2 \
    --lora_dim 64 --only_optimize_lora --lora_learning_rate 2e-4 \
    --dtype bf16 --gradient_checkpointing \
    "$@"
