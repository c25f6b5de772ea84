#!/usr/bin/env bash
# Step 3, Llama-3.1-8B actor, Llama-3.1-8B reward model and critic, one 80 GB GPU: adapters.
source "$(dirname "${BASH_SOURCE[0]}")/../../../../recipe.sh"

recipe output/llama-3.1-8b/ppo \
    --actor_model_name_or_path output/llama-3.1-8b/sft \
    --reward_model_name_or_path output/llama-3.1-8b/reward \
    --data_path Dahoas/rm-static --data_split 2,4,4 \
    --per_device_generation_batch_size 16 --generation_batches 4 \
    --per_device_training_batch_size 4 --gradient_accumulation_steps 8 \
    --num_warmup_steps 20 --missing_eos_penalty 1 \
    --actor_lora_dim 64 --critic_lora_dim 64 --only_optimize_lora --lora_learning_rate 1e-5 \
    --dtype bf16 --gradient_checkpointing \
    --offload_reference_model --offload_reward_model \
    "$@"
