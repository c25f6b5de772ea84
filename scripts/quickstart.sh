#!/usr/bin/env bash
# Installs the suite, then trains a tiny Llama on chats about small sums: SFT -> sampled and judged pairs ->
# reward model -> PPO. When run again, it skips finished stages.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/quickstart.sh [--seed N] [--fresh] [--short] [--dpo] [--rollout_engine NAME] [--output DIR]

  --seed N       seed of the data, the weights and the training (default 1)
  --fresh        start over
  --short        a few steps of each stage, to test the installation
  --dpo          also train with DPO on the pairs, and compare
  --rollout_engine NAME  hybrid, transformers or vllm, for the rollouts of PPO (default hybrid); vllm gets an
                 environment of its own
  --output DIR   output folder (default output/quickstart)

The environment is made by scripts/install.sh (see its --help). PROCESSES=N sets the processes of each training step
(default: the GPUs of this machine, at most 8; one on CPU).
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
declare -A option=([output]=$root/output/quickstart [seed]=1 [rollout_engine]=hybrid) least=([seed]=0)
declare -A choices=([rollout_engine]="hybrid transformers vllm") switches=([short]=0 [dpo]=0)
source "$root/scripts/options.sh" "$@"
seed=${option[seed]} short=${switches[short]} dpo=${switches[dpo]}
if [[ -n ${PROCESSES:-} ]]; then
    whole_number PROCESSES "$PROCESSES" 1
    PROCESSES=$REPLY
fi

# Sizes. Batches are over all processes.
sft_steps=400 sft_batch=64 sft_lr=4e-3
pair_prompts=2000 samples_per_prompt=8 pairs_per_prompt=6
reward_epochs=1 reward_batch=64 reward_lr=1e-3
dpo_lr=5e-4 dpo_beta=0.3 dpo_sft_coef=1
ppo_iterations=30 ppo_batch=128 ppo_minibatch=64 ppo_epochs=2 actor_lr=1e-4 critic_lr=1e-3 kl_coef=0.5
eval_prompts=160 eval_every=10
if ((short)); then
    sft_steps=60 pair_prompts=200 reward_batch=16 ppo_iterations=3 eval_prompts=32 eval_every=3
fi
max_prompt=48 max_answer=32

engine=${option[rollout_engine]} extras=()
if [[ $engine == vllm ]]; then extras=(vllm); fi
bin=$(bash "$root/scripts/install.sh" "${extras[@]}")
export PATH="$bin:$PATH" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
cd "$root"

source scripts/stages.sh
processes=${PROCESSES:-$((devices > 8 ? 8 : devices > 0 ? devices : 1))}
while ((sft_batch % processes || ppo_minibatch % processes)); do processes=$((processes - 1)); done
per_device() { echo $(($1 / processes)); }

begin_stages data model sft pairs reward ppo dpo
stage data python scripts/quickstart/arithmetic_chats.py --output "$output/data" --seed "$seed" \
    --sft_examples $((sft_steps * sft_batch)) --pair_prompts $pair_prompts \
    --rl_prompts $((ppo_iterations * ppo_batch)) --eval_prompts $eval_prompts

stage model python scripts/quickstart/make_model.py --data "$output/data/sft_train.jsonl" --output "$output/model" --seed "$seed"

stage sft step step1_supervised_finetuning \
    --model_name_or_path "$output/model" --output_dir "$output/sft" --seed "$seed" --dtype fp32 \
    --data_path "$output/data/sft_train.jsonl" --eval_data_path "$output/data/sft_eval.jsonl" --data_split 1,0,0 \
    --max_seq_len $((max_prompt + max_answer)) --per_device_train_batch_size "$(per_device $sft_batch)" \
    --per_device_eval_batch_size "$(per_device $sft_batch)" --eval_iters 4 --eval_interval 100 \
    --learning_rate $sft_lr --adam_beta2 0.99 --num_warmup_steps $((sft_steps / 20)) --zero_stage 0

stage pairs python training/step2_reward_model_finetuning/make_preferences.py \
    --model_name_or_path "$output/sft" --output_dir "$output/pairs" --seed "$seed" --dtype fp32 \
    --data_path "$output/data/prompts_train.jsonl" --data_split 0,0,1 \
    --judge scripts/quickstart/arithmetic_chats.py:judge \
    --num_samples_per_prompt $samples_per_prompt --pairs_per_prompt $pairs_per_prompt \
    --max_prompt_seq_len $max_prompt --max_answer_seq_len $max_answer --per_device_generation_batch_size 64

stage reward step step2_reward_model_finetuning \
    --model_name_or_path "$output/sft" --output_dir "$output/reward" --seed "$seed" --dtype fp32 \
    --data_path "$output/pairs/preferences.jsonl" --data_split 0,1,0 --eval_fraction 0.1 \
    --max_seq_len $((max_prompt + max_answer)) --per_device_train_batch_size "$(per_device $reward_batch)" \
    --per_device_eval_batch_size "$(per_device $reward_batch)" --num_train_epochs $reward_epochs \
    --learning_rate $reward_lr --num_warmup_steps 10 --zero_stage 0

stage ppo step step3_rlhf_finetuning \
    --actor_model_name_or_path "$output/sft" --reward_model_name_or_path "$output/reward" \
    --output_dir "$output/ppo" --seed "$seed" --dtype fp32 \
    --data_path "$output/data/prompts_rl.jsonl" --eval_data_path "$output/data/prompts_eval.jsonl" --data_split 0,0,1 \
    --max_prompt_seq_len $max_prompt --max_answer_seq_len $max_answer \
    --per_device_generation_batch_size "$(per_device $ppo_batch)" \
    --per_device_training_batch_size "$(per_device $ppo_minibatch)" --ppo_epochs $ppo_epochs \
    --actor_learning_rate $actor_lr --critic_learning_rate $critic_lr --kl_coef $kl_coef \
    --lr_scheduler_type constant --missing_eos_penalty 1 --actor_zero_stage 0 --critic_zero_stage 0 \
    --judge scripts/quickstart/arithmetic_chats.py:judge --eval_interval $eval_every --rollout_engine "$engine"

runs=("$output/sft" "$output/reward" "$output/ppo") compared=()
if ((dpo)); then
    stage dpo step step2_dpo_finetuning \
        --model_name_or_path "$output/sft" --output_dir "$output/dpo" --seed "$seed" --dtype fp32 \
        --data_path "$output/pairs/preferences.jsonl" --data_split 0,1,0 --eval_fraction 0.1 \
        --max_seq_len $((max_prompt + max_answer)) --per_device_train_batch_size "$(per_device $reward_batch)" \
        --per_device_eval_batch_size "$(per_device $reward_batch)" \
        --learning_rate $dpo_lr --beta $dpo_beta --sft_coef $dpo_sft_coef --num_warmup_steps 10 --zero_stage 0
    runs+=("$output/dpo") compared=(--dpo "$output/dpo")
fi

echo "== summary"
python scripts/quickstart/summarize.py --output "$output" --sft "$output/sft" --ppo "$output/ppo" \
    --prompts "$output/data/prompts_eval.jsonl" --reward_run "$output/reward" --stages "$output/stages" --seed "$seed" "${compared[@]}"
python scripts/report.py "${runs[@]}" -o "$output/report.html"

cat <<TEXT

Curves, and responses before and after:     $output/report.html
Chat with the model:                        $bin/python scripts/chat.py $output/ppo
Train your own, step by step:               training/step1_supervised_finetuning/README.md
A real model on real conversations:         bash scripts/smollm2.sh
TEXT
