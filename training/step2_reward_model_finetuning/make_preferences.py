"""Make preference pairs from a model's own answers: sample several a prompt, have them scored, pair them.

    python training/step2_reward_model_finetuning/make_preferences.py --model_name_or_path output/sft \\
        --data_path prompts.jsonl --judge my_judge.py:judge --output_dir output/pairs

The judge is a function judge(prompts, responses, rows) -> list of numbers, higher is better; `rows` holds the other
columns of each prompt's row. Instead of it --reward takes what it takes in step 3: reward models, functions, rules,
services. Answers that score alike make no pair. OUTPUT_DIR/preferences.jsonl is data for step 2: prompt, chosen,
rejected and both scores. Several processes share the prompts, and the file is the same for any number of them.
Held-out rows (--eval_fraction) are not asked.
"""

import json
from collections.abc import Callable, Sequence
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import distributed as dist
from transformers import PreTrainedTokenizerBase

from dschat import arguments, launch
from dschat.command_line import SettingsError, parse, settings_of_user
from dschat.data.batches import rank_share
from dschat.data.chat_template import Message, decode_responses, stop_token_ids
from dschat.data.collators import collate_prompts
from dschat.deepspeed_config import DTYPES, frozen_config
from dschat.engines import frozen_engine
from dschat.generation import HybridEngine, Rollout, SamplingParams
from dschat.models.causal_lm import load_causal_lm, load_tokenizer
from dschat.models.scalar_head import TokenScores, load_scalar_head
from dschat.rlhf.patience import Patience
from dschat.rlhf.rewards import (
    Answers,
    RewardModel,
    Rewards,
    judged,
    load_judge,
    model_paths,
    parse_reward,
    reward_problems,
)
from dschat.set_up import data_options, load_splits, model_problems, start

Score = Callable[[Rollout, Answers], list[float | None]]
GROUPS = (
    arguments.PairArguments, arguments.RewardArguments, arguments.DataArguments, arguments.DeviceArguments,
    arguments.RunArguments,
)  # fmt: skip


def check(sampling: arguments.PairArguments, reward: arguments.RewardArguments, *_: Any) -> list[str]:
    tokens = sampling.max_prompt_seq_len + sampling.max_answer_seq_len
    problems = model_problems("--model_name_or_path", sampling.model_name_or_path, tokens=tokens,
                              lengths="--max_prompt_seq_len + --max_answer_seq_len")  # fmt: skip
    if bool(sampling.judge) == bool(reward.reward):
        problems.append("--judge and --reward: one of them says which answer is better; give one")
    if reward.normalize_rewards:
        problems.append("--normalize_rewards: answers to one prompt are compared; weigh the sources by @WEIGHT instead")
    mistakes = reward_problems(reward.reward, max_tokens=sampling.max_answer_seq_len)
    paths = [] if mistakes else model_paths(reward.reward)
    return problems + mistakes + [
        line for path in paths for line in model_problems("--reward", path, tokens=0, lengths="")
    ]  # fmt: skip


def main() -> None:
    sampling, reward, data, devices, run = parse(GROUPS, description=__doc__, check=check)
    device = start(run, devices)
    tokenizer = load_tokenizer(sampling.model_name_or_path)
    prompts = load_splits("prompt", tokenizer, data_options(data, run, max_tokens=sampling.max_prompt_seq_len)).train
    model = load_causal_lm(sampling.model_name_or_path, dtype=DTYPES[devices.dtype], tokenizer=tokenizer).to(device)
    stop_ids = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    actor = HybridEngine(model)
    with settings_of_user():
        score = judge_of(sampling.judge) if sampling.judge else reward_of(reward, sampling, devices, tokenizer)

    pairs: list[tuple[int, dict[str, Any]]] = []
    share = rank_share(
        range(len(prompts)), rank=launch.rank(), world_size=launch.world_size(),
        micro_batch_size=sampling.per_device_generation_batch_size,
    )  # fmt: skip
    for number, indices in enumerate(share, start=1):
        if indices:  # a rank may be left without prompts at the end
            batch = collate_prompts([prompts[index] for index in indices])
            rollout, answers = sampled_answers(actor, tokenizer, batch, indices, sampling, stop_ids, run.seed)
            pairs += scored_pairs(
                batch["messages"], answers.responses, score(rollout, answers), indices,
                at_most=sampling.pairs_per_prompt, seed=run.seed,
            )  # fmt: skip
        if launch.is_main():
            print(f"[make_preferences] {number}/{len(share)} batches, {len(pairs)} pairs on this rank", flush=True)

    everyone: list[list[tuple[int, dict]]] = [[] for _ in range(launch.world_size())]
    dist.all_gather_object(everyone, pairs)
    rows = [row for _, row in sorted((pair for part in everyone for pair in part), key=itemgetter(0))]
    if not rows:
        raise SettingsError(
            f"no pair came of {len(prompts)} prompts: the {sampling.num_samples_per_prompt} answers to each were "
            "scored alike, or not at all: raise --num_samples_per_prompt or --temperature, or let the judge (or the "
            "rewards) tell more answers apart."
        )
    if launch.is_main():
        path = Path(run.output_dir, "preferences.jsonl")
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        print(f"[make_preferences] {len(rows)} pairs of {len(prompts)} prompts in {path}")


def judge_of(source: str) -> Score:
    """What a judge says; one that fails ends the run."""
    judge = load_judge(source)
    return lambda _, answers: list(judged(judge, answers.messages, answers.responses, answers.rows))


def reward_of(
    reward: arguments.RewardArguments, sampling: arguments.PairArguments, devices: arguments.DeviceArguments,
    tokenizer: PreTrainedTokenizerBase,
) -> Score:  # fmt: skip
    """The weighted sum of the sources; None where one fails."""
    config = frozen_config(
        dtype=devices.dtype, zero_stage=0, micro_batch_size=sampling.per_device_generation_batch_size,
        world_size=launch.world_size(),
    )  # fmt: skip
    models = {}
    for path in model_paths(reward.reward):
        own = load_tokenizer(path)
        network = TokenScores(load_scalar_head(path, dtype=DTYPES[devices.dtype], tokenizer=own))
        models[path] = RewardModel(
            frozen_engine(network, config=config), tokenizer=own, actor_tokenizer=tokenizer,
            micro_batch_size=sampling.per_device_generation_batch_size,
        )  # fmt: skip
    rewards = Rewards(
        [parse_reward(entry) for entry in reward.reward], normalize=False, models=models,
        patience=Patience(seconds=reward.reward_timeout, retries=reward.reward_retries),
    )  # fmt: skip

    def score(rollout: Rollout, answers: Answers) -> list[float | None]:
        scores = rewards.score(rollout, answers)
        return [value if known else None for value, known in zip(scores.total.tolist(), scores.known, strict=True)]

    return score


def sampled_answers(
    actor: HybridEngine, tokenizer: PreTrainedTokenizerBase, batch: dict[str, list], indices: Sequence[int],
    sampling: arguments.PairArguments, stop_ids: Sequence[int], seed: int,
) -> tuple[Rollout, Answers]:  # fmt: skip
    """For each prompt, num_samples_per_prompt answers; the prompt's index in the data seeds them, not its batch.

    Args:
        batch: of collate_prompts.
    """
    samples = sampling.num_samples_per_prompt
    ids = torch.tensor(indices)[:, None] * samples + torch.arange(samples)  # [prompts, samples]
    with actor.generation():
        rollout = actor.generate(
            repeated(batch["prompts"], samples), max_new_tokens=sampling.max_answer_seq_len,
            eos_token_ids=stop_ids, pad_token_id=tokenizer.pad_token_id, seed=seed, sample_ids=ids.flatten(),
            sampling=SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p),
        )  # fmt: skip
    answers = Answers(
        repeated(batch["messages"], samples), decode_responses(tokenizer, rollout.responses()), rollout.responses(),
        repeated(batch["rows"], samples), rollout.ended.tolist(), sampling.max_answer_seq_len,
    )  # fmt: skip
    return rollout, answers


def scored_pairs(
    prompts: Sequence[list[Message]], responses: Sequence[str], scores: Sequence[float | None], indices: Sequence[int],
    *, at_most: int, seed: int,
) -> list[tuple[int, dict[str, Any]]]:  # fmt: skip
    """(index of the prompt, row of the preference file) for every pair found among the answers to a batch of prompts.

    Args:
        responses, scores: equally many for each prompt, prompt after prompt; answers without a score make no pair.
    """
    samples, pairs = len(responses) // len(prompts), []
    for number, (index, prompt) in enumerate(zip(indices, prompts, strict=True)):
        mine = [row for row in range(number * samples, (number + 1) * samples) if scores[row] is not None]
        found = preference_pairs(
            [responses[row] for row in mine], [scores[row] for row in mine], at_most=at_most,
            chooser=Random(f"{seed}/{index}"),
        )  # fmt: skip
        pairs += [(index, {"prompt": prompt, **pair}) for pair in found]
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


def repeated(values: Sequence[Any], times: int) -> list[Any]:
    """Each value so many times."""
    return [value for value in values for _ in range(times)]


if __name__ == "__main__":
    launch.run(main)
