#!/usr/bin/env bash
# Step 3, SmolLM2-1.7B actor, SmolLM2-1.7B reward model and critic, one node of 8 x 80 GB.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"

recipe output/smollm2-1.7b/ppo \
    --actor_model_name_or_path output/smollm2-1.7b/sft \
    --reward_model_name_or_path output/smollm2-1.7b/reward \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_generation_batch_size 16 --per_device_training_batch_size 8 \
    --num_warmup_steps 20 --missing_eos_penalty 1 \
    --dtype bf16 --gradient_checkpointing \
    "$@"
