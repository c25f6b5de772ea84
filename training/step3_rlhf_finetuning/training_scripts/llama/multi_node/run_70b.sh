#!/usr/bin/env bash
# Step 3, Llama-3.1-70B actor, Llama-3.1-8B reward model and critic, 4 nodes of 8 x 180 GB: adapters on the actor.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"
nodes=4

recipe output/llama-3.1-70b/ppo \
    --actor_model_name_or_path output/llama-3.1-70b/sft \
    --reward_model_name_or_path output/llama-3.1-8b/reward \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_generation_batch_size 8 --per_device_training_batch_size 4 \
    --num_warmup_steps 20 --missing_eos_penalty 1 \
    --actor_lora_dim 64 --only_optimize_lora --lora_learning_rate 1e-5 \
    --dtype bf16 --actor_zero_stage 3 --critic_zero_stage 3 --gradient_checkpointing \
    --offload_reference_model \
    "$@"
