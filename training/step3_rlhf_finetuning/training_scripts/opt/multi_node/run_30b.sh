#!/usr/bin/env bash
# Step 3, OPT-30b actor, OPT-350m reward model and critic, 2 nodes of 8 x 80 GB.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"
nodes=2

recipe output/opt-30b/ppo \
    --actor_model_name_or_path output/opt-30b/sft \
    --reward_model_name_or_path output/opt-350m/reward \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_generation_batch_size 4 --generation_batches 2 --per_device_training_batch_size 4 \
    --num_warmup_steps 20 --missing_eos_penalty 1 \
    --dtype bf16 --actor_zero_stage 3 --offload --gradient_checkpointing \
    --offload_reference_model \
    "$@"
