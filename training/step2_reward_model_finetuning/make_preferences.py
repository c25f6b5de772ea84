"""Make preference pairs from a model's own answers: sample several a prompt, let a Python judge score them, pair them.

    python training/step2_reward_model_finetuning/make_preferences.py --model_name_or_path output/sft \\
        --data_path prompts.jsonl --judge my_judge.py:judge --output_dir output/pairs

The judge is a function judge(prompts, responses, rows) -> list of numbers, higher is better; `rows` holds the other
columns of each prompt's row. Answers that score alike make no pair. OUTPUT_DIR/preferences.jsonl is data for step 2:
prompt, chosen, rejected and both scores. Several processes share the prompts.
"""

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import distributed as dist

from dschat import arguments, launch
from dschat.command_line import parse
from dschat.data.batches import rank_share
from dschat.data.chat_template import stop_token_ids
from dschat.data.collators import collate_prompts
from dschat.deepspeed_config import DTYPES
from dschat.generation import HybridEngine
from dschat.models.causal_lm import load_causal_lm, load_tokenizer
from dschat.rlhf.rewards import load_judge
from dschat.set_up import data_options, load_splits, model_problems

GROUPS = (arguments.PairArguments, arguments.DataArguments, arguments.DeviceArguments, arguments.RunArguments)


def check(sampling: arguments.PairArguments, *_: Any) -> list[str]:
    tokens = sampling.max_prompt_seq_len + sampling.max_answer_seq_len
    return model_problems("--model_name_or_path", sampling.model_name_or_path, tokens=tokens,
                          lengths="--max_prompt_seq_len + --max_answer_seq_len")  # fmt: skip


def main() -> None:
    sampling, data, devices, run = parse(GROUPS, description=__doc__, check=check)
    device = launch.join(seed=run.seed)
    judge = load_judge(sampling.judge)
    tokenizer = load_tokenizer(sampling.model_name_or_path)
    prompts = load_splits("prompt", tokenizer, data_options(data, run, max_tokens=sampling.max_prompt_seq_len)).train
    model = load_causal_lm(sampling.model_name_or_path, dtype=DTYPES[devices.dtype], tokenizer=tokenizer).to(device)
    stop_ids = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    actor = HybridEngine(model)

    pairs: list[dict[str, Any]] = []
    share = rank_share(
        range(len(prompts)), rank=launch.rank(), world_size=launch.world_size(),
        micro_batch_size=sampling.per_device_generation_batch_size,
    )  # fmt: skip
    for number, indices in enumerate(share, start=1):
        batch = collate_prompts([prompts[index] for index in indices])
        repeated = {name: repeat(values, sampling.num_samples_per_prompt) for name, values in batch.items()}
        first_ids = torch.tensor(repeated["row_index"], dtype=torch.long) * sampling.num_samples_per_prompt
        numbers = torch.arange(len(first_ids)) % sampling.num_samples_per_prompt
        with actor.generation():
            rollout = actor.generate(
                repeated["prompts"], max_new_tokens=sampling.max_answer_seq_len, eos_token_ids=stop_ids,
                pad_token_id=tokenizer.pad_token_id, temperature=sampling.temperature, top_k=sampling.top_k,
                top_p=sampling.top_p, seed=run.seed, sample_ids=first_ids + numbers,
            )  # fmt: skip
        answers = tokenizer.batch_decode(rollout.responses(), skip_special_tokens=True)
        scores = judge([chat[-1]["content"] for chat in repeated["messages"]], answers, repeated["rows"])
        for position, chat in enumerate(batch["messages"]):
            mine = slice(position * sampling.num_samples_per_prompt, (position + 1) * sampling.num_samples_per_prompt)
            chooser = Random(f"{run.seed}/{batch['row_index'][position]}")
            found = preference_pairs(
                answers[mine], list(scores)[mine], at_most=sampling.pairs_per_prompt, chooser=chooser
            )
            pairs += [{"prompt": chat, **pair} for pair in found]
        if launch.is_main():
            print(f"[make_preferences] {number}/{len(share)} batches, {len(pairs)} pairs on this rank", flush=True)

    everyone: list[list[dict]] = [[] for _ in range(launch.world_size())]
    dist.all_gather_object(everyone, pairs)
    if launch.is_main():
        path = Path(run.output_dir, "preferences.jsonl")
        rows = [row for part in everyone for row in part]
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        print(f"[make_preferences] {len(rows)} pairs of {len(prompts)} prompts in {path}")


def preference_pairs(
    answers: Sequence[str], scores: Sequence[float], *, at_most: int, chooser: Random
) -> list[dict[str, Any]]:
    """Pairs of answers whose scores differ, picked at random among all such pairs, no text twice against itself."""
    differing = [
        (better, worse) if scores[better] > scores[worse] else (worse, better)
        for better, worse in combinations(range(len(answers)), 2)
        if scores[better] != scores[worse] and answers[better].strip() != answers[worse].strip()
    ]
    usable = [(better, worse) for better, worse in differing if answers[better].strip() and answers[worse].strip()]
    return [
        {"chosen": answers[better], "rejected": answers[worse],
         "chosen_score": float(scores[better]), "rejected_score": float(scores[worse])}
        for better, worse in chooser.sample(usable, min(at_most, len(usable)))
    ]  # fmt: skip


def repeat(values: Sequence[Any], times: int) -> list[Any]:
    return [value for value in values for _ in range(times)]


if __name__ == "__main__":
    launch.run(main)
