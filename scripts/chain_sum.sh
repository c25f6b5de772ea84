#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns to add: SFT on a few hundred worked sums, then GRPO on sums of growing length, level by
# level. The only reward is the correctness of the last number.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/chain_sum.sh [OPTION ...]

  --output DIR       output folder (default output/chain_sum); finished stages are skipped
  --fresh            start over (downloads are kept)
  --seed N           seed of data order and sampling (default 1)
  --processes N      processes of each step (default: the GPUs of this machine, else 1)
  --sft_steps N      steps of 16 worked sums of 2 to 5 numbers (default 40)
  --iterations N     updates per level, of 8 responses to each of 8 sums (default 35)
  --rl_flags "..."   further flags for step 3

The levels have sums of 2 or 3, 3 or 4, 4 or 5 one-digit numbers (reasoning-gym's chain_sum). Sums whose responses are all
correct or all wrong are replaced (DAPO's dynamic sampling): rollouts are cheap, updates are not.
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
declare -A option=([output]=$root/output/chain_sum [seed]=1 [processes]="" [sft_steps]=40 [iterations]=35 [rl_flags]="")
declare -A least=([seed]=0 [processes]=1 [sft_steps]=1 [iterations]=1)
source "$root/scripts/options.sh" "$@"
seed=${option[seed]}

bin=$(bash "$root/scripts/install.sh" smollm2 reasoning)
export PATH="$bin:$PATH" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
cd "$root"
source scripts/stages.sh

processes=${option[processes]:-$((devices > 0 ? devices : 1))}
((8 % processes == 0)) || fail "--processes $processes: must divide the 8 sums of an update: choose 1, 2, 4 or 8"
read -ra rl_flags <<<"${option[rl_flags]}"
begin_stages model data sft level1 level2 level3

stage model python scripts/smollm2/prepare_model.py --output "$output/model" --no_system_prompt

stage data python scripts/chain_sum/worked_sums.py --output "$output/data" --seed "$seed" --rows 1000 --max_terms 5

stage sft step step1_supervised_finetuning --seed "$seed" \
    --model_name_or_path "$output/model" --output_dir "$output/sft" --data_path "$output/data/sft.jsonl" \
    --max_seq_len 128 --per_device_train_batch_size $((16 / processes)) --max_steps "${option[sft_steps]}" \
    --learning_rate 2e-5 --num_warmup_steps 4 --eval_iters 4 --zero_stage 2

# reasoning-gym generates row i from seed + i: seeds that differ by more than the sizes give different rows.
sums() { echo "reasoning_gym:chain_sum?size=$1&seed=$2&min_terms=$3&max_terms=$4&min_digits=1&max_digits=1"; }
start=$output/sft
for level in 1 2 3; do
    stage "level$level" step step3_rlhf_finetuning --seed "$seed" --algorithm grpo \
        --actor_model_name_or_path "$start" --output_dir "$output/level$level" --reward 'last_number?column=answer' \
        --data_path "$(sums 4000 $((level * 1000000 + seed * 10000)) $((level + 1)) $((level + 2)))" \
        --eval_data_path "$(sums 128 9000000 2 5)" --eval_interval 12 \
        --num_samples_per_prompt 8 --dynamic_sampling 3 --per_device_generation_batch_size $((8 / processes)) \
        --per_device_training_batch_size 8 --gradient_accumulation_steps $((8 / processes)) \
        --max_prompt_seq_len 64 --max_answer_seq_len 64 --max_steps "${option[iterations]}" \
        --actor_learning_rate 1e-5 --lr_scheduler_type constant_with_warmup --num_warmup_steps 4 --kl_coef 0 \
        --old_logprobs rollout --actor_zero_stage 2 "${rl_flags[@]}"
    start=$output/level$level
done

echo "== summary"
python scripts/chain_sum/evaluate.py --output "$output" --models "$output"/{sft,level1,level2,level3}
python scripts/report.py "$output"/{sft,level1,level2,level3} -o "$output/report.html"
cat <<TEXT

Curves, and responses before and after:     $output/report.html
Chat with the model:                        $bin/python scripts/chat.py $output/level3
TEXT
