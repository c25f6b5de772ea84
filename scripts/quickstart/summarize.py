"""Final evaluation of the quickstart: SFT and PPO on held-out prompts, by the gold reward not used in training.

    python scripts/quickstart/summarize.py --sft SFT --ppo PPO --prompts prompts_eval.jsonl --reward_run REWARD \\
        --stages STAGES --output output/quickstart

writes `summary.json` into the output folder and prints responses before and after.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from arithmetic_chats import accuracy, judge
from deepspeed.accelerator import get_accelerator

from dschat.arguments.script_inputs import (
    SEEDS,
    existing_file,
    existing_folder,
    exit_on_mistake,
    new_folder,
    number_type,
    read_json_lines,
)
from dschat.data.chat_template import encode_prompt, stop_token_ids
from dschat.distributed.terminal import printable
from dschat.generation import HybridEngine, SamplingParams
from dschat.models.causal_lm import load_causal_lm, load_tokenizer
from dschat.models.tokenizer import id_limit

MAX_NEW_TOKENS = 32
PRINTED_ROWS = 6


def respond(folder: Path, prompts: list[str], *, temperature: float, seed: int) -> list[str]:
    """One response per prompt from the exported model in `folder`; temperature 0 is greedy."""
    tokenizer = load_tokenizer(folder)
    model = load_causal_lm(folder, dtype=torch.float32, tokenizer=tokenizer)
    engine = HybridEngine(model.to(get_accelerator().current_device_name()).eval())
    with engine.generation():
        rollout = engine.generate(
            [encode_prompt(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts],
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_ids=stop_token_ids(tokenizer, model.generation_config.eos_token_id),
            pad_token_id=tokenizer.pad_token_id,
            sampling=SamplingParams(temperature, vocabulary_size=id_limit(tokenizer)),
            seed=seed,
        )
    return [text.strip() for text in tokenizer.batch_decode(rollout.responses(), skip_special_tokens=True)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def evaluate(folder: Path, rows: list[dict], *, samples: int, seed: int) -> tuple[dict[str, float], list[str]]:
    """Gold reward and accuracy of a model: sampled at temperature 1 (the main metrics) and greedy.

    Returns:
        figures, and one sampled response for each row.
    """
    figures, first = {}, []
    for suffix, temperature, repeats in (("", 1.0, samples), ("_greedy", 0.0, 1)):
        repeated = [row for row in rows for _ in range(repeats)]
        prompts = [row["prompt"] for row in repeated]
        responses = respond(folder, prompts, temperature=temperature, seed=seed)
        figures[f"gold_reward{suffix}"] = mean(judge(prompts, responses, repeated))
        figures[f"accuracy{suffix}"] = mean(accuracy(prompts, responses, repeated))
        first = first or responses[::repeats]
    return figures, first


def reward_model_accuracy(run: Path) -> float | None:
    """Held-out pair accuracy of the reward model, from the last evaluation of its run."""
    rows = read_json_lines(run / "metrics.jsonl", fields=["phase"])
    evaluations = [row["accuracy"] for row in rows if row["phase"] == "eval" and row.get("accuracy") is not None]
    return round(evaluations[-1], 4) if evaluations else None


def stage_seconds(folder: Path) -> dict[str, int]:
    """Seconds of every finished stage, from the first line of its stamp file."""
    stamps = sorted(folder.glob("[!.]*"), key=lambda stamp: stamp.stat().st_mtime)
    seconds = {}
    for stamp in stamps:
        first = stamp.read_text(encoding="utf-8").partition("\n")[0]
        if not first.isdecimal():
            raise ValueError(f"{stamp}: is not a stamp of a stage: its first line must be the seconds")
        seconds[stamp.name] = int(first)
    return seconds


def print_summary(summary: dict[str, Any], rows: list[dict], before: list[str], after: list[str]) -> None:
    for row, sft, ppo in list(zip(rows, before, after, strict=True))[:PRINTED_ROWS]:
        print(printable(f"\n  {row['prompt']}\n    SFT: {sft}\n    PPO: {ppo}"))
    models = [name for name in ("sft", "ppo", "dpo") if f"accuracy_{name}" in summary]
    head = "  ".join(f"{name.upper():>6}" for name in models)
    print(f"\n                  {head}    (held-out prompts, sampled at temperature 1)")
    for title, figure in (("gold reward", "gold_reward"), ("accuracy", "accuracy")):
        cells = "  ".join(f"{summary[f'{figure}_{name}']:6.3f}" for name in models)
        print(f"  {title:<14}  {cells}")
    pair_accuracy = summary["reward_model_accuracy"]
    print(f"  reward model's pair accuracy: {'unknown' if pair_accuracy is None else f'{pair_accuracy:.3f}'}")
    print(f"  seconds: {', '.join(f'{name} {seconds}' for name, seconds in summary['seconds'].items())}\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=new_folder, required=True, help="folder for summary.json")
    parser.add_argument("--sft", type=existing_folder, required=True, help="exported model of step 1")
    parser.add_argument("--ppo", type=existing_folder, required=True, help="exported actor of step 3")
    parser.add_argument("--dpo", type=existing_folder, help="exported model of step2_dpo_finetuning (optional)")
    parser.add_argument("--prompts", type=existing_file, required=True,
                        help="jsonl with held-out prompts and their answers")  # fmt: skip
    parser.add_argument("--reward_run", type=existing_folder, required=True, help="output folder of step 2")
    parser.add_argument("--stages", type=existing_folder, required=True, help="folder with the stamps of the stages")
    parser.add_argument("--samples", type=number_type(int, at_least=1), default=4,
                        help="responses sampled for each prompt")  # fmt: skip
    parser.add_argument("--seed", type=number_type(int, **SEEDS), default=1)
    options = parser.parse_args(arguments)
    with exit_on_mistake("summarize"):
        summarize(options)


def summarize(options: argparse.Namespace) -> None:
    rows = read_json_lines(options.prompts, fields=["prompt", "answer"])
    if not rows:
        raise ValueError(f"{options.prompts} has no rows")
    pair_accuracy, seconds = reward_model_accuracy(options.reward_run), stage_seconds(options.stages)
    sft, before = evaluate(options.sft, rows, samples=options.samples, seed=options.seed)
    ppo, after = evaluate(options.ppo, rows, samples=options.samples, seed=options.seed)
    figures = {f"{name}_sft": round(value, 4) for name, value in sft.items()}
    figures |= {f"{name}_ppo": round(value, 4) for name, value in ppo.items()}
    if options.dpo:
        dpo, _ = evaluate(options.dpo, rows, samples=options.samples, seed=options.seed)
        figures |= {f"{name}_dpo": round(value, 4) for name, value in dpo.items()}
    summary = figures | {
        "reward_model_accuracy": pair_accuracy,
        "prompts": len(rows),
        "samples_per_prompt": options.samples,
        "seed": options.seed,
        "seconds": seconds,
    }
    (options.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print_summary(summary, rows, before, after)


if __name__ == "__main__":
    main()
