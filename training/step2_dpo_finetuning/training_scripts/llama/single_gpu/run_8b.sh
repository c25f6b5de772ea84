#!/usr/bin/env bash
# DPO after step 1, Llama-3.1-8B, one 80 GB GPU: adapters only, the model without them is the reference.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"

recipe output/llama-3.1-8b/dpo \
    --model_name_or_path output/llama-3.1-8b/sft \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 16 \
    --num_warmup_steps 10 \
    --lora_dim 64 --only_optimize_lora --lora_learning_rate 5e-6 --reference adapters_off \
    --dtype bf16 --gradient_checkpointing \
    "$@"
