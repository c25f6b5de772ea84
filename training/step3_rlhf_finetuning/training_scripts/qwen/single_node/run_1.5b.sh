#!/usr/bin/env bash
# Step 3, Qwen2.5-1.5B actor, Qwen2.5-1.5B reward model and critic, one node of 8 x 80 GB.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"

recipe output/qwen2.5-1.5b/ppo \
    --actor_model_name_or_path output/qwen2.5-1.5b/sft \
    --reward_model_name_or_path output/qwen2.5-1.5b/reward \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_generation_batch_size 16 --per_device_training_batch_size 8 \
    --num_warmup_steps 20 --missing_eos_penalty 1 \
    --dtype bf16 --gradient_checkpointing \
    "$@"
