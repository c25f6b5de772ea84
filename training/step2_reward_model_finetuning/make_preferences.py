"""Make preference pairs from a model's own responses: sample several per prompt, score them, build pairs.

    python training/step2_reward_model_finetuning/make_preferences.py --model_name_or_path output/sft \\
        --data_path prompts.jsonl --judge my_judge.py:judge --output_dir output/pairs

The judge is a function judge(prompts, responses, rows) -> list of numbers, higher is better; `rows` holds the other
columns of each prompt's row. Alternatively --reward accepts the same sources as in step 3: reward models, functions,
rules, services. Responses with equal scores are not paired. OUTPUT_DIR/preferences.jsonl is data for step 2: prompt,
chosen, rejected and both scores. Prompts are split over the processes; the file does not depend on their number.
Held-out rows (--eval_fraction) are skipped. Every scored batch is saved at once: an interrupted run is resumed with
--resume auto and writes the same file. A finished file is replaced only with --overwrite.
"""

import hashlib
from collections.abc import Callable, Sequence
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat import arguments
from dschat.arguments.command_line import SettingsError, parse, settings_of_user
from dschat.arguments.secrets import redacted_values
from dschat.data.arrow import content_digest
from dschat.data.chat_template import Message, decode_responses, stop_token_ids
from dschat.data.collators import collate_prompts
from dschat.data.datasets import data_problems
from dschat.distributed import collectives, groups, launch, watchdog
from dschat.distributed.deepspeed_config import DTYPES, frozen_config
from dschat.distributed.engines import frozen_engine
from dschat.generation import HybridEngine, Rollout, SamplingParams
from dschat.models.causal_lm import load_causal_lm, load_tokenizer
from dschat.models.scalar_head import TokenScores, load_scalar_head
from dschat.preference.judged_batches import FINAL, JudgedBatch, JudgedBatches, already_there, batches_to_do
from dschat.rewards.functions import judge_problems
from dschat.rewards.retry import NoScores, RetryPolicy
from dschat.rewards.reward_model import tokens_read
from dschat.rewards.weighted_sum import (
    Answers,
    RewardModel,
    Rewards,
    load_judge,
    model_paths,
    parse_reward,
    reward_problems,
)
from dschat.runs import signals
from dschat.runs.set_up import data_options, load_splits, model_problems, start

MAX_FAILED_CALLS = 3  # consecutive batches without any score on one process: then the run stops
Score = Callable[[Rollout, Answers], list[float | None]]


def check(settings: arguments.PairSettings) -> list[str]:
    """Problems with the settings: model and lengths, judge and rewards, data, output folder."""
    sampling, reward, run = settings.sampling, settings.rewards, settings.run
    tokens = sampling.max_prompt_seq_len + sampling.max_answer_seq_len
    lengths, trusted = "--max_prompt_seq_len + --max_answer_seq_len", sampling.trust_remote_code
    problems = model_problems(
        "--model_name_or_path", sampling.model_name_or_path, tokens=tokens, lengths=lengths, trust_remote_code=trusted,
        causal=True,
    )  # fmt: skip
    usable = not problems
    if bool(sampling.judge) == bool(reward.reward):
        problems.append("--judge and --reward: one of them says which answer is better; give one")
    problems += judge_problems(sampling.judge)
    problems += data_problems("prompt", data_options(settings.data, run, max_tokens=sampling.max_prompt_seq_len))
    final = Path(run.output_dir, FINAL)
    if final.exists() and run.resume == "never" and not run.overwrite:
        problems.append(f"--output_dir {run.output_dir}: {already_there(final)}")
    if reward.normalize_rewards:
        problems.append("--normalize_rewards: answers to one prompt are compared; weigh the sources by @WEIGHT instead")
    mistakes = reward_problems(reward.reward, max_tokens=sampling.max_answer_seq_len)
    paths = [] if mistakes else model_paths(reward.reward)
    for path in paths:
        own = model_problems("--reward", path, tokens=0, lengths=lengths, trust_remote_code=trusted)
        if usable and not own:
            read = tokens_read(path, sampling.model_name_or_path, tokens=tokens, trust_remote_code=trusted)
            own = model_problems("--reward", path, tokens=read, lengths=lengths, trust_remote_code=trusted)
        mistakes = mistakes + own
    return problems + mistakes


def main() -> None:
    settings = parse(arguments.PairSettings, description=__doc__, check=check)
    sampling, reward, data = settings.sampling, settings.rewards, settings.data
    devices, run = settings.devices, settings.run
    device = start(run, devices)
    trusted = sampling.trust_remote_code
    tokenizer = load_tokenizer(sampling.model_name_or_path, trust_remote_code=trusted)
    prompts = load_splits("prompt", tokenizer, data_options(data, run, max_tokens=sampling.max_prompt_seq_len)).train
    with settings_of_user():
        judged = JudgedBatches(
            run.output_dir, decisive_settings(sampling, reward, devices, run, prompts), resume=run.resume == "auto",
            overwrite=run.overwrite,
        )  # fmt: skip
    if judged.finished:
        log(f"{Path(run.output_dir, FINAL)} is finished, made with the same settings: nothing is left to do")
        return
    model = load_causal_lm(
        sampling.model_name_or_path, dtype=DTYPES[devices.dtype], tokenizer=tokenizer, trust_remote_code=trusted
    ).to(device)
    stop_ids = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    actor = HybridEngine(model)
    with settings_of_user():
        score = judge_of(sampling) if sampling.judge else reward_of(reward, sampling, devices, tokenizer)

    def judge(indices: list[int]) -> JudgedBatch:
        batch = collate_prompts([prompts[index] for index in indices])
        watchdog.phase("sampling")
        rollout, answers = sampled_answers(actor, tokenizer, batch, indices, sampling, stop_ids, run.seed)
        watchdog.phase("judging")
        scores = score(rollout, answers)
        pairs = scored_pairs(
            batch["messages"], answers.responses, scores, indices, ended=answers.ended,
            at_most=sampling.pairs_per_prompt, seed=run.seed,
        )  # fmt: skip
        unscored = scores.count(None)
        return JudgedBatch(indices, pairs, scored=len(scores) - unscored, unscored=unscored)

    batches = judge_all(judge, judged, prompts=len(prompts), batch_size=sampling.per_device_generation_batch_size)
    write_pairs(batches, judged, prompts=len(prompts), samples=sampling.num_samples_per_prompt)


def judge_all(
    judge: Callable[[list[int]], JudgedBatch], judged: JudgedBatches, *, prompts: int, batch_size: int
) -> list[JudgedBatch]:
    """Judge the remaining batches, split over the ranks.

    Returns: the judged batches of all ranks, unordered, on the main rank; on the others those of the resumed run alone.

    Raises:
        SavedAndLeft: any rank received a signal; judged batches are saved.
        SettingsError: a rank cannot write, or its judge keeps failing; judged batches are saved.
    """
    to_do = batches_to_do(prompts, batch_size=batch_size, earlier=judged.earlier)
    size = groups.data_parallel_size()
    rounds = [to_do[start : start + size] for start in range(0, len(to_do), size)]
    pairs = sum(len(batch.pairs) for batch in judged.earlier)
    if judged.earlier:
        log(f"going on: {prompts - sum(map(len, to_do))} of {prompts} prompts are judged, {pairs} pairs")
    made: list[JudgedBatch] = []
    with signals.capture_signals() as received, received.listening():
        for number, batches in enumerate(rounds, start=1):
            problem = None
            if groups.data_parallel_rank() < len(batches):  # the last round may have fewer batches than ranks
                try:
                    batch = judge(batches[groups.data_parallel_rank()])
                    made.append(batch)
                    if batch.scored:  # a batch without scores is not saved: --resume auto retries it
                        judged.append(batch)
                except (NoScores, OSError) as error:
                    problem = str(error)
            state = problem, received.number, len(made[-1].pairs) if made and problem is None else 0
            problems, signal_numbers, counts = zip(*collectives.all_gather_objects(state), strict=True)
            pairs += sum(counts[: len(batches)])
            log(f"{number}/{len(rounds)} batches on each process, {pairs} pairs")
            if any(problems):
                raise SettingsError(f"{'; '.join(filter(None, problems))}: what is judged so far is kept; mend it and "
                                    "go on with --resume auto")  # fmt: skip
            if any(signal_numbers) and number < len(rounds):
                log("a signal asked for it: this run ends here, --resume auto goes on")
                raise signals.SavedAndLeft
    return judged.earlier + collectives.gather_lists_to_main(made)


def write_pairs(batches: Sequence[JudgedBatch], judged: JudgedBatches, *, prompts: int, samples: int) -> None:
    """Write the final file, in the order of the prompts; a collective, the main rank has all batches.

    Raises: SettingsError without pairs, or if writing fails.
    """
    rows = [row for _, row in sorted((pair for batch in batches for pair in batch.pairs), key=itemgetter(0))]
    if collectives.broadcast_from_main(not rows):
        raise SettingsError(
            f"no pair came of {prompts} prompts: the {samples} answers to each were "
            "scored alike, or not at all: raise --num_samples_per_prompt or --temperature, or let the judge (or the "
            "rewards) tell more answers apart."
        )
    problem = None
    if collectives.is_main():
        try:
            path = judged.finish(rows)
            unscored = sum(batch.unscored for batch in batches)
            missing = f"; {unscored} answers have no score and are in none" if unscored else ""
            log(f"{len(rows)} pairs of {prompts} prompts in {path}{missing}")
        except OSError as error:
            problem = f"{error}: what is judged is kept; make room and go on with --resume auto"
    problem = collectives.all_gather_objects(problem)[0]
    if problem:
        raise SettingsError(problem)


def decisive_settings(
    sampling: arguments.PairArguments, reward: arguments.RewardArguments, devices: arguments.PairDeviceArguments,
    run: arguments.PairRunArguments, prompts: Dataset,
) -> dict[str, Any]:  # fmt: skip
    """Settings that determine the pairs and must be unchanged on resume; the batch size is not among them."""
    names = ("model_name_or_path", "num_samples_per_prompt", "pairs_per_prompt", "max_prompt_seq_len",
             "max_answer_seq_len", "temperature", "top_k", "top_p", "judge")  # fmt: skip
    settings = {f"--{name}": vars(sampling)[name] for name in names}
    settings |= {"--reward": redacted_values(reward.reward), "--dtype": devices.dtype, "--seed": run.seed}
    content = content_digest(prompts) if collectives.is_main() else None  # settings are compared on the main rank
    return settings | {
        "the model's weights": weights_sample(Path(sampling.model_name_or_path)), "prompts": len(prompts),
        "the prompts' content": content,
    }  # fmt: skip


def weights_sample(folder: Path) -> str:
    """Digest of parts of a local model's weights, enough to detect training; "" for a hub name."""
    digest = hashlib.sha256()
    files = sorted(path for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".json"))
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(path.stat().st_size - (1 << 16), 0))
            digest.update(file.read())
    return digest.hexdigest()[:16] if files else ""


def log(text: str) -> None:
    if collectives.is_main():
        print(f"[make_preferences] {text}", flush=True)


def judge_of(sampling: arguments.PairArguments) -> Score:
    """Scoring by the judge; None for a response that it fails on."""
    judge = load_judge(sampling.judge)
    retry_policy = RetryPolicy(
        seconds=sampling.judge_timeout, retries=sampling.judge_retries, max_failed_calls=MAX_FAILED_CALLS
    )
    return lambda _, answers: retry_policy.judge_scores(judge, answers.messages, answers.responses, answers.rows)


def reward_of(
    reward: arguments.RewardArguments, sampling: arguments.PairArguments, devices: arguments.PairDeviceArguments,
    tokenizer: PreTrainedTokenizerBase,
) -> Score:  # fmt: skip
    """Scoring by the weighted sum of the reward sources; None where one fails."""
    config = frozen_config(
        dtype=devices.dtype, zero_stage=0, micro_batch_size=sampling.per_device_generation_batch_size,
        world_size=groups.data_parallel_size(),
    )  # fmt: skip
    models, trusted = {}, sampling.trust_remote_code
    for path in model_paths(reward.reward):
        own = load_tokenizer(path, trust_remote_code=trusted)
        network = TokenScores(
            load_scalar_head(path, dtype=DTYPES[devices.dtype], tokenizer=own, trust_remote_code=trusted)
        )
        models[path] = RewardModel(
            frozen_engine(network, config=config), tokenizer=own, actor_tokenizer=tokenizer,
            micro_batch_size=sampling.per_device_generation_batch_size,
        )  # fmt: skip
    rewards = Rewards(
        [parse_reward(entry) for entry in reward.reward], normalize=False, models=models,
        retry_policy=RetryPolicy(
            seconds=reward.reward_timeout, retries=reward.reward_retries, max_failed_calls=MAX_FAILED_CALLS
        ),
    )  # fmt: skip

    def score(rollout: Rollout, answers: Answers) -> list[float | None]:
        scores = rewards.score(rollout, answers)
        return [value if known else None for value, known in zip(scores.total.tolist(), scores.has_score, strict=True)]

    return score


def sampled_answers(
    actor: HybridEngine, tokenizer: PreTrainedTokenizerBase, batch: dict[str, list], indices: Sequence[int],
    sampling: arguments.PairArguments, stop_ids: Sequence[int], seed: int,
) -> tuple[Rollout, Answers]:  # fmt: skip
    """Sample num_samples_per_prompt responses per prompt, seeded by the prompt's index in the data, not its batch.

    Args:
        batch: made by collate_prompts.
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
    *, ended: Sequence[bool], at_most: int, seed: int,
) -> list[tuple[int, dict[str, Any]]]:  # fmt: skip
    """(index of the prompt, row of the preference file) for every pair built from the responses to a batch of prompts.

    Args:
        responses, scores, ended: equally many per prompt, grouped by prompt; responses without a score are not paired.
    """
    samples, pairs = len(responses) // len(prompts), []
    for number, (index, prompt) in enumerate(zip(indices, prompts, strict=True)):
        mine = [row for row in range(number * samples, (number + 1) * samples) if scores[row] is not None]
        found = preference_pairs(
            [responses[row] for row in mine], [scores[row] for row in mine], ended=[ended[row] for row in mine],
            at_most=at_most, chooser=Random(f"{seed}/{index}"),
        )  # fmt: skip
        pairs += [(index, {"prompt": prompt, **pair}) for pair in found]
    return pairs


def preference_pairs(
    answers: Sequence[str], scores: Sequence[float], *, ended: Sequence[bool], at_most: int, chooser: Random
) -> list[dict[str, Any]]:
    """Random pairs of non-empty responses whose scores and texts differ.

    Args:
        ended: False for a response truncated at the length limit: step 2 then appends no end token.
    """
    differing = [
        (better, worse) if scores[better] > scores[worse] else (worse, better)
        for better, worse in combinations(range(len(answers)), 2)
        if scores[better] != scores[worse] and answers[better].strip() != answers[worse].strip()
    ]
    usable = [(better, worse) for better, worse in differing if answers[better].strip() and answers[worse].strip()]
    return [
        {"chosen": answers[better], "rejected": answers[worse],
         "chosen_score": float(scores[better]), "rejected_score": float(scores[worse]),
         "chosen_ended": ended[better], "rejected_ended": ended[worse]}
        for better, worse in chooser.sample(usable, min(at_most, len(usable)))
    ]  # fmt: skip


def repeated(values: Sequence[Any], times: int) -> list[Any]:
    """Repeat each value `times` times."""
    return [value for value in values for _ in range(times)]


if __name__ == "__main__":
    launch.run(main)
