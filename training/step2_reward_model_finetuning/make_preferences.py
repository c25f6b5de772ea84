"""Make preference pairs from a model's own answers: sample several a prompt, let a Python judge score them, pair them.

    python training/step2_reward_model_finetuning/make_preferences.py --model_name_or_path output/sft \\
        --data_path prompts.jsonl --judge my_judge.py:judge --output_dir output/pairs

The judge is a function judge(prompts, responses, rows) -> list of numbers, higher is better; `rows` holds the other
columns of each prompt's row. Answers that score alike make no pair. OUTPUT_DIR/preferences.jsonl is data for step 2:
prompt, chosen, rejected and both scores. Several processes share the prompts, and the file is the same for any number
of them. Held-out rows (--eval_fraction) are not asked.
"""

import json
from collections.abc import Sequence
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import distributed as dist
from transformers import PreTrainedTokenizerBase

from dschat import arguments, launch
from dschat.command_line import SettingsError, parse
from dschat.data.batches import rank_share
from dschat.data.chat_template import decode_responses, stop_token_ids
from dschat.data.collators import collate_prompts
from dschat.deepspeed_config import DTYPES
from dschat.generation import HybridEngine, SamplingParams
from dschat.models.causal_lm import load_causal_lm, load_tokenizer
from dschat.rlhf.rewards import Judge, judged, load_judge
from dschat.set_up import data_options, load_splits, model_problems, start

GROUPS = (arguments.PairArguments, arguments.DataArguments, arguments.DeviceArguments, arguments.RunArguments)


def check(sampling: arguments.PairArguments, *_: Any) -> list[str]:
    tokens = sampling.max_prompt_seq_len + sampling.max_answer_seq_len
    return model_problems("--model_name_or_path", sampling.model_name_or_path, tokens=tokens,
                          lengths="--max_prompt_seq_len + --max_answer_seq_len")  # fmt: skip


def main() -> None:
    sampling, data, devices, run = parse(GROUPS, description=__doc__, check=check)
    device = start(run, devices)
    judge = load_judge(sampling.judge)
    tokenizer = load_tokenizer(sampling.model_name_or_path)
    prompts = load_splits("prompt", tokenizer, data_options(data, run, max_tokens=sampling.max_prompt_seq_len)).train
    model = load_causal_lm(sampling.model_name_or_path, dtype=DTYPES[devices.dtype], tokenizer=tokenizer).to(device)
    stop_ids = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    actor = HybridEngine(model)

    pairs: list[tuple[int, dict[str, Any]]] = []
    share = rank_share(
        range(len(prompts)), rank=launch.rank(), world_size=launch.world_size(),
        micro_batch_size=sampling.per_device_generation_batch_size,
    )  # fmt: skip
    for number, indices in enumerate(share, start=1):
        if indices:  # a rank may be left without prompts at the end
            batch = collate_prompts([prompts[index] for index in indices])
            answers = sampled_answers(actor, tokenizer, batch["prompts"], indices, sampling, stop_ids, run.seed)
            pairs += judged_pairs(judge, batch, answers, indices, at_most=sampling.pairs_per_prompt, seed=run.seed)
        if launch.is_main():
            print(f"[make_preferences] {number}/{len(share)} batches, {len(pairs)} pairs on this rank", flush=True)

    everyone: list[list[tuple[int, dict]]] = [[] for _ in range(launch.world_size())]
    dist.all_gather_object(everyone, pairs)
    rows = [row for _, row in sorted((pair for part in everyone for pair in part), key=itemgetter(0))]
    if not rows:
        raise SettingsError(
            f"no pair came of {len(prompts)} prompts: the judge scored the {sampling.num_samples_per_prompt} answers "
            "to each alike: raise --num_samples_per_prompt or --temperature, or let the judge tell more answers apart."
        )
    if launch.is_main():
        path = Path(run.output_dir, "preferences.jsonl")
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        print(f"[make_preferences] {len(rows)} pairs of {len(prompts)} prompts in {path}")


def sampled_answers(
    actor: HybridEngine, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], indices: Sequence[int],
    sampling: arguments.PairArguments, stop_ids: Sequence[int], seed: int,
) -> list[list[str]]:  # fmt: skip
    """For each prompt, num_samples_per_prompt answers; the prompt's index in the data seeds them, not its batch."""
    samples = sampling.num_samples_per_prompt
    ids = torch.tensor(indices)[:, None] * samples + torch.arange(samples)  # [prompts, samples]
    with actor.generation():
        rollout = actor.generate(
            [prompt for prompt in prompts for _ in range(samples)], max_new_tokens=sampling.max_answer_seq_len,
            eos_token_ids=stop_ids, pad_token_id=tokenizer.pad_token_id, seed=seed, sample_ids=ids.flatten(),
            sampling=SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p),
        )  # fmt: skip
    texts = decode_responses(tokenizer, rollout.responses())
    return [texts[start : start + samples] for start in range(0, len(texts), samples)]


def judged_pairs(
    judge: Judge, batch: dict[str, list], answers: Sequence[Sequence[str]], indices: Sequence[int], *, at_most: int,
    seed: int,
) -> list[tuple[int, dict[str, Any]]]:  # fmt: skip
    """(index of the prompt, row of the preference file) for every pair found among the answers of a batch of prompts.

    Args:
        batch: of collate_prompts.
    """
    times = [len(texts) for texts in answers]
    scores = iter(judged(
        judge, repeated(batch["messages"], times), [text for texts in answers for text in texts],
        repeated(batch["rows"], times),
    ))  # fmt: skip
    pairs = []
    for index, chat, texts in zip(indices, batch["messages"], answers, strict=True):
        found = preference_pairs(
            texts, [next(scores) for _ in texts], at_most=at_most, chooser=Random(f"{seed}/{index}")
        )
        pairs += [(index, {"prompt": chat, **pair}) for pair in found]
    return pairs


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


def repeated(values: Sequence[Any], times: Sequence[int]) -> list[Any]:
    """Each value as often as its number says."""
    return [value for value, count in zip(values, times, strict=True) for _ in range(count)]


if __name__ == "__main__":
    launch.run(main)
