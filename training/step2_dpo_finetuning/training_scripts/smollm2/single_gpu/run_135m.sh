#!/usr/bin/env bash
# DPO after step 1, SmolLM2-135M, one 80 GB GPU.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"

recipe output/smollm2-135m/dpo \
    --model_name_or_path output/smollm2-135m/sft \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_train_batch_size 32 --per_device_eval_batch_size 32 --gradient_accumulation_steps 2 \
    --learning_rate 2e-6 --num_warmup_steps 10 \
    --dtype bf16 \
    "$@"
