#!/usr/bin/env bash
# Iterative DPO: rounds of pairs sampled from the newest model and judged, then preference optimisation on them.
# When run again, it skips finished stages.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/iterative_dpo.sh --model DIR --prompts FILE --judge FILE.py:FUNCTION [OPTION ...]

  --model DIR          the model of the first round, usually step 1's export
  --prompts FILE       rows with a prompt and the columns that the judge reads
  --judge F.py:NAME    scores responses: see training/step2_reward_model_finetuning/README.md
  --output DIR         output folder (default output/iterative_dpo); finished stages are skipped
  --rounds N           number of rounds (default 3)
  --reference WHICH    round: the initial model of the round (default); first: --model, in every round
  --seed N             seed of the training; responses of round R are sampled with N + R (default 1)
  --dtype TYPE         bf16 or fp32 (default bf16)
  --max_prompt N       longest prompt, in tokens (default 256)
  --max_answer N       longest response, in tokens (default 256)
  --samples N          responses to each prompt (default 4)
  --pairs N            most pairs per prompt (default 2)
  --batch N            pairs per optimizer step, over all processes (default 64)
  --processes N        processes of the training (default: the GPUs of this machine, else 1)
  --fresh              start over

Further flags of the two programs, for instance --dpo_flags "--beta 0.3 --learning_rate 5e-7":
  --pair_flags "..."   --dpo_flags "..."

The models are OUTPUT/dpo-1, OUTPUT/dpo-2, ...; the pairs OUTPUT/pairs-1, ...
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
declare -A option=(
    [model]="" [prompts]="" [judge]="" [output]=$root/output/iterative_dpo [rounds]=3 [reference]=round [seed]=1
    [dtype]=bf16 [max_prompt]=256 [max_answer]=256 [samples]=4 [pairs]=2 [batch]=64 [processes]=""
    [pair_flags]="" [dpo_flags]=""
)
declare -A choices=([dtype]="bf16 fp32" [reference]="round first") least=(
    [rounds]=1 [seed]=0 [max_prompt]=1 [max_answer]=1 [samples]=2 [pairs]=1 [batch]=1 [processes]=1
)
source "$root/scripts/options.sh" "$@"
for name in model prompts judge; do
    [[ -n ${option[$name]} ]] || fail "--$name is required (see --help)"
done
judge_file=${option[judge]%%:*}
[[ -f $judge_file && ${option[judge]} == *.py:?* ]] || fail "--judge ${option[judge]}: must be FILE.py:FUNCTION, with an existing file"
# Paths are relative to the caller's folder; the programs run in the root of the repository.
option[judge]=$(realpath -- "$judge_file"):${option[judge]#*:}
[[ ! -e ${option[model]} ]] || option[model]=$(realpath -- "${option[model]}")
prompts=${option[prompts]}
if [[ -e $prompts ]]; then
    prompts=$(realpath -- "$prompts")
elif [[ $prompts == *:* && -e ${prompts%:*} ]]; then # FILE:WEIGHT
    prompts=$(realpath -- "${prompts%:*}"):${prompts##*:}
fi

bin=$(bash "$root/scripts/install.sh")
export PATH="$bin:$PATH" TOKENIZERS_PARALLELISM=false
cd "$root"
source scripts/stages.sh
processes=${option[processes]:-$((devices > 0 ? devices : 1))}
((option[batch] % processes == 0)) || fail "--batch ${option[batch]} must be a multiple of the $processes processes"
read -ra pair_flags <<<"${option[pair_flags]}"
read -ra dpo_flags <<<"${option[dpo_flags]}"
stages=()
for ((round = 1; round <= option[rounds]; round++)); do
    stages+=("pairs-$round" "dpo-$round")
done
if ((fresh)); then
    for folder in "$output"/{pairs,dpo}-*; do # also those of further rounds
        ! is_marked "$folder" || stages+=("$(basename "$folder")")
    done
fi
begin_stages "${stages[@]}"

model=${option[model]}
for ((round = 1; round <= option[rounds]; round++)); do
    stage "pairs-$round" python training/step2_reward_model_finetuning/make_preferences.py \
        --model_name_or_path "$model" --output_dir "$output/pairs-$round" --seed $((option[seed] + round)) \
        --data_path "$prompts" --judge "${option[judge]}" --eval_fraction 0 --dtype "${option[dtype]}" \
        --max_prompt_seq_len "${option[max_prompt]}" --max_answer_seq_len "${option[max_answer]}" \
        --num_samples_per_prompt "${option[samples]}" --pairs_per_prompt "${option[pairs]}" "${pair_flags[@]}"

    reference=$model
    [[ ${option[reference]} == round ]] || reference=${option[model]}
    stage "dpo-$round" step step2_dpo_finetuning \
        --model_name_or_path "$model" --ref_model_name_or_path "$reference" --output_dir "$output/dpo-$round" \
        --seed "${option[seed]}" --data_path "$output/pairs-$round/preferences.jsonl" --dtype "${option[dtype]}" \
        --max_seq_len $((option[max_prompt] + option[max_answer])) \
        --per_device_train_batch_size $((option[batch] / processes)) \
        --per_device_eval_batch_size $((option[batch] / processes)) "${dpo_flags[@]}"
    model=$output/dpo-$round
done

mapfile -t runs < <(seq -f "$output/dpo-%g" "${option[rounds]}")
python scripts/report.py "${runs[@]}" -o "$output/report.html"
echo "The model of the last round: $model; the curves of all: $output/report.html"
