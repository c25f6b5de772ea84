"""Make preference pairs from a model's own responses: sample several per prompt, score them, build pairs.

    python training/step2_reward_model_finetuning/make_preferences.py --model_name_or_path output/sft \\
        --data_path prompts.jsonl --judge my_judge.py:judge --output_dir output/pairs

The judge is a function judge(prompts, responses, rows) -> list of numbers, higher is better; `rows` has the other
columns of each prompt's row. Alternatively --reward accepts the same sources as in step 3: reward models, functions,
rules, services. Responses with equal scores are not paired. OUTPUT_DIR/preferences.jsonl is data for step 2: prompt,
chosen, rejected and both scores. Prompts are split over the processes; the file does not depend on their number.
Held-out rows (--eval_fraction) are skipped. Every scored batch is saved at once: an interrupted run is resumed with
--resume auto and writes the same file. A finished file is replaced only with --overwrite.
"""

from dschat.arguments import PairSettings
from dschat.arguments.command_line import as_settings_errors, exit_with_help, parse

if __name__ == "__main__":
    exit_with_help(PairSettings, __doc__)  # before the imports below, which take seconds

from pathlib import Path

from dschat.data.collators import collate_prompts
from dschat.data.datasets import data_problems
from dschat.distributed import launch, watchdog
from dschat.distributed.deepspeed_config import DTYPES
from dschat.models.causal_lm import load_causal_lm, load_tokenizer
from dschat.preference.judged_batches import FINAL, JudgedBatch, JudgedBatches, already_exists_message
from dschat.preference.judging import judge_all, log, write_pairs
from dschat.preference.pair_settings import settings_of_pairs
from dschat.preference.pairing import pairs_of_batch
from dschat.preference.response_sampling import ResponseSampler
from dschat.preference.response_scoring import score_function
from dschat.rewards.functions import judge_problems
from dschat.rewards.reward_model import required_positions
from dschat.rewards.weighted_sum import model_paths, reward_problems
from dschat.runs.set_up import data_options, load_splits, start
from dschat.runs.validation import model_problems


def check(settings: PairSettings) -> list[str]:
    """Problems with the settings: model and lengths, judge and rewards, output folder, data."""
    sampling, reward, run = settings.sampling, settings.rewards, settings.run
    tokens = sampling.max_prompt_seq_len + sampling.max_answer_seq_len
    lengths, trust = "--max_prompt_seq_len + --max_answer_seq_len", sampling.trust_remote_code
    problems = model_problems(
        "--model_name_or_path", sampling.model_name_or_path, tokens=tokens, lengths=lengths, trust_remote_code=trust,
        causal=True,
    )  # fmt: skip
    model_is_valid = not problems
    if bool(sampling.judge) == bool(reward.reward):
        problems.append("--judge and --reward: set exactly one of them; it scores the responses")
    problems += judge_problems(sampling.judge)
    final = Path(run.output_dir, FINAL)
    if final.exists() and run.resume == "never" and not run.overwrite:
        problems.append(f"--output_dir {run.output_dir}: {already_exists_message(final)}")
    if reward.normalize_rewards:
        problems.append("--normalize_rewards: not supported here; set weights of the sources by @WEIGHT instead")
    source_problems = reward_problems(reward.reward, max_tokens=sampling.max_answer_seq_len)
    problems += source_problems
    for path in [] if source_problems else model_paths(reward.reward):
        path_problems = model_problems("--reward", path, tokens=0, lengths=lengths, trust_remote_code=trust)
        if model_is_valid and not path_problems:
            reward_tokens = required_positions(
                path, sampling.model_name_or_path, tokens=tokens, trust_remote_code=trust
            )
            path_problems = model_problems(
                "--reward", path, tokens=reward_tokens, lengths=lengths, trust_remote_code=trust
            )
        problems += path_problems
    options = data_options(settings.data, run, max_tokens=sampling.max_prompt_seq_len)
    return problems + data_problems("prompt", options)


def main() -> None:
    # Set up
    settings = parse(PairSettings, description=__doc__, check=check)
    sampling, run = settings.sampling, settings.run
    model_path, trust = sampling.model_name_or_path, sampling.trust_remote_code
    device = start(run, settings.devices)
    tokenizer = load_tokenizer(model_path, trust_remote_code=trust)
    options = data_options(settings.data, run, max_tokens=sampling.max_prompt_seq_len)
    prompts = load_splits("prompt", tokenizer, options).train
    with as_settings_errors():
        judged = JudgedBatches(
            run.output_dir, settings_of_pairs(settings, prompts), resume=run.resume == "auto", overwrite=run.overwrite
        )
    if judged.finished:
        log(f"{Path(run.output_dir, FINAL)} is already finished with the same settings")
        return
    dtype = DTYPES[settings.devices.dtype]
    with as_settings_errors():
        model = load_causal_lm(model_path, dtype=dtype, tokenizer=tokenizer, trust_remote_code=trust).to(device)
    sampler = ResponseSampler(model, tokenizer, sampling, seed=run.seed)
    with as_settings_errors():
        score = score_function(settings, tokenizer)

    def judge_batch(indices: list[int]) -> JudgedBatch:
        batch = collate_prompts([prompts[index] for index in indices])
        # Generate
        watchdog.phase("sampling")
        rollout, answers = sampler.sample(batch, indices)
        # Judge
        watchdog.phase("judging")
        scores = score(rollout, answers)
        pairs = pairs_of_batch(
            batch["messages"], answers.responses, scores, ended=answers.ended, indices=indices,
            max_pairs=sampling.pairs_per_prompt, seed=run.seed,
        )  # fmt: skip
        unscored = scores.count(None)
        return JudgedBatch(indices, pairs, scored=len(scores) - unscored, unscored=unscored)

    batches = judge_all(judge_batch, judged, prompts=len(prompts), batch_size=sampling.per_device_generation_batch_size)

    # Write
    write_pairs(batches, judged, prompts=len(prompts), samples=sampling.num_samples_per_prompt)


if __name__ == "__main__":
    launch.run(main)
