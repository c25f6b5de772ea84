#!/usr/bin/env bash
# Step 1, OPT-30b, 2 nodes of 8 x 80 GB.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"
nodes=2

recipe output/opt-30b/sft \
    --model_name_or_path facebook/opt-30b \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_train_batch_size 8 --per_device_eval_batch_size 8 \
    --num_warmup_steps 10 --num_train_epochs 2 \
    --dtype bf16 --zero_stage 3 --gradient_checkpointing \
    "$@"
