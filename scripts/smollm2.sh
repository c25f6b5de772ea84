#!/usr/bin/env bash
# SmolLM2-135M-Instruct on human conversations: SFT, a reward model on pairs derived from them, and PPO.
# The defaults take under an hour on two CPU cores.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/smollm2.sh [OPTION ...]

  --output DIR         output folder (default output/smollm2); finished stages are skipped
  --fresh              start over (downloads are kept)
  --seed N             seed of split, data order and sampling (default 1)
  --processes N        processes of each step (default: the GPUs of this machine, else 1)
  --dtype TYPE         bf16 or fp32 (default bf16)

Sizes; batches are per optimizer step, over all processes:
  --sft_steps N        optimizer steps of step 1 (default 100; there are 6,200 examples)
  --sft_batch N        examples in each (default 16)
  --reward_steps N     optimizer steps of step 2 (default 60; there are 4,200 pairs)
  --reward_batch N     pairs in each (default 16)
  --ppo_iterations N   rollouts of step 3 (default 18; there are 2,000 prompts)
  --ppo_batch N        prompts in each (default 32)
  --answer N           longest response of step 3, in tokens (default 40)

Further flags of the programs, for instance --ppo_flags "--kl_coef 0.02 --ppo_epochs 2":
  --sft_flags "..."    --reward_flags "..."    --ppo_flags "..."

On a GPU, one epoch of all data: --sft_steps 388 --reward_steps 265 --ppo_iterations 65 --answer 64
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
declare -A option=(
    [output]=$root/output/smollm2 [seed]=1 [processes]="" [dtype]=bf16
    [sft_steps]=100 [sft_batch]=16 [reward_steps]=60 [reward_batch]=16 [ppo_iterations]=18 [ppo_batch]=32 [answer]=40
    [sft_flags]="" [reward_flags]="" [ppo_flags]=""
)
declare -A choices=([dtype]="bf16 fp32") least=(
    [seed]=0 [processes]=1 [sft_steps]=1 [sft_batch]=1 [reward_steps]=1 [reward_batch]=1 [ppo_iterations]=1
    [ppo_batch]=1 [answer]=1
)
source "$root/scripts/options.sh" "$@"
seed=${option[seed]}

# Before HF_HUB_OFFLINE and the threads are set: pip must be online.
bin=$(bash "$root/scripts/install.sh" smollm2)
export PATH="$bin:$PATH" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
cd "$root"
source scripts/stages.sh

processes=${option[processes]:-$((devices > 0 ? devices : 1))}
# divide NAME PARTS: set $REPLY to the micro-batch of an option's batch, with PARTS micro-batches per process.
divide() {
    local batch=${option[$1]} ways=$((processes * $2))
    ((batch % ways == 0)) || fail "--$1 $batch must be a multiple of its $ways micro-batches ($processes processes x $2)"
    REPLY=$((batch / ways))
}
# Micro-batches of 8 on the CPU: larger ones do not fit into its caches. The gradient does not depend on it.
divide sft_batch 2; sft_micro=$REPLY
divide reward_batch 2; reward_micro=$REPLY
divide ppo_batch 1; ppo_rollout=$REPLY
divide ppo_batch 4; ppo_micro=$REPLY
read -ra sft_flags <<<"${option[sft_flags]}"
read -ra reward_flags <<<"${option[reward_flags]}"
read -ra ppo_flags <<<"${option[ppo_flags]}"

begin_stages model data sft reward ppo
common=(--seed "$seed" --dtype "${option[dtype]}" --gradient_accumulation_steps 2)

stage model python scripts/smollm2/prepare_model.py --output "$output/model"

stage data python scripts/smollm2/prepare_data.py --output "$output/data" --seed "$seed"

stage sft step step1_supervised_finetuning "${common[@]}" \
    --model_name_or_path "$output/model" --output_dir "$output/sft" \
    --data_path "$output/data/sft.jsonl" --eval_data_path "$output/data/sft_eval.jsonl" --data_split 1,0,0 \
    --max_seq_len 256 --per_device_train_batch_size "$sft_micro" --max_steps "${option[sft_steps]}" \
    --learning_rate 5e-5 --num_warmup_steps 5 --zero_stage 2 "${sft_flags[@]}"

stage reward step step2_reward_model_finetuning "${common[@]}" \
    --model_name_or_path "$output/sft" --output_dir "$output/reward" \
    --data_path "$output/data/preferences.jsonl" --eval_data_path "$output/data/preferences_eval.jsonl" \
    --data_split 0,1,0 --max_seq_len 256 --per_device_train_batch_size "$reward_micro" \
    --max_steps "${option[reward_steps]}" --learning_rate 5e-5 --num_warmup_steps 5 --centering_coef 0.01 \
    --zero_stage 2 "${reward_flags[@]}"

# Two updates per iteration, each on half the rollout in two micro-batches.
stage ppo step step3_rlhf_finetuning "${common[@]}" \
    --actor_model_name_or_path "$output/sft" --reward_model_name_or_path "$output/reward" --output_dir "$output/ppo" \
    --data_path "$output/data/prompts.jsonl" --eval_data_path "$output/data/prompts_eval.jsonl" --data_split 0,0,1 \
    --max_prompt_seq_len 128 --max_answer_seq_len "${option[answer]}" \
    --per_device_generation_batch_size "$ppo_rollout" --per_device_training_batch_size "$ppo_micro" \
    --max_steps "${option[ppo_iterations]}" --actor_learning_rate 5e-6 --critic_learning_rate 1e-5 --kl_coef 0.05 \
    --lr_scheduler_type constant_with_warmup --num_warmup_steps 4 --missing_eos_penalty 1 \
    --actor_zero_stage 2 --critic_zero_stage 2 --eval_iters 2 --eval_interval 9 "${ppo_flags[@]}"

echo "== summary"
python scripts/smollm2/summarize.py "$output"
python scripts/report.py "$output"/{sft,reward,ppo} -o "$output/report.html"
cat <<TEXT

Curves, and responses before and after:     $output/report.html
Chat with the model:                        $bin/python scripts/chat.py $output/ppo
TEXT
