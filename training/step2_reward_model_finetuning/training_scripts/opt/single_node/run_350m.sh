#!/usr/bin/env bash
# Step 2, OPT-350m, one node of 8 x 80 GB.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"

recipe output/opt-350m/reward \
    --model_name_or_path facebook/opt-350m \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_train_batch_size 8 --per_device_eval_batch_size 8 \
    --num_warmup_steps 10 \
    --dtype bf16 \
    "$@"
