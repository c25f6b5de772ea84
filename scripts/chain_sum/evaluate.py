"""Evaluation at the end of scripts/chain_sum.sh: accuracy of each model on unseen sums, by number of terms.

    python scripts/chain_sum/evaluate.py --output output/chain_sum --models output/chain_sum/{sft,level1,level2,level3}

writes `summary.json` into the output folder: for every model the accuracy on sums of 3, 4, 5 and 6 numbers, sampled at
temperature 1 (4 responses per sum) and greedy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import reasoning_gym
import torch
from deepspeed.accelerator import get_accelerator

from dschat.arguments.script_inputs import existing_folder, exit_on_mistake, number_type, read_json_lines
from dschat.data.chat_template import decode_responses, encode_prompt, stop_token_ids
from dschat.generation import HybridEngine, SamplingParams
from dschat.models.causal_lm import load_causal_lm, load_tokenizer
from dschat.models.tokenizer import id_limit
from dschat.rewards.answer_extraction import last_number

TERMS = (3, 4, 5, 6)
SAMPLES = 4


def seen_prompts(output: Path) -> set[str]:
    """All prompts used in SFT or in rollouts."""
    seen = {row["prompt"] for row in read_json_lines(output / "data" / "sft.jsonl", fields=["prompt"])}
    for samples in output.glob("level*/samples.jsonl"):
        rows = read_json_lines(samples, fields=["prompt", "phase"])
        seen |= {row["prompt"] for row in rows if row["phase"] == "train"}
    return seen


def unseen_sums(terms: int, count: int, seen: set[str]) -> list[dict]:
    dataset = reasoning_gym.create_dataset(
        "chain_sum", size=4 * count, seed=5_000_000 + 10_000 * terms, min_terms=terms, max_terms=terms, min_digits=1,
        max_digits=1,
    )  # fmt: skip
    unseen = {entry["question"]: entry for entry in dataset if entry["question"] not in seen}
    return list(unseen.values())[:count]


def respond(folder: Path, questions: list[str], *, temperature: float) -> list[str]:
    tokenizer = load_tokenizer(folder)
    model = load_causal_lm(folder, dtype=torch.bfloat16, tokenizer=tokenizer)
    engine = HybridEngine(model.to(get_accelerator().current_device_name()).eval())
    with engine.generation():
        rollout = engine.generate(
            [encode_prompt(tokenizer, [{"role": "user", "content": question}]) for question in questions],
            max_new_tokens=80,
            eos_token_ids=stop_token_ids(tokenizer, model.generation_config.eos_token_id),
            pad_token_id=tokenizer.pad_token_id,
            sampling=SamplingParams(temperature, vocabulary_size=id_limit(tokenizer)),
            seed=1,
        )
    return decode_responses(tokenizer, rollout.responses())


def accuracy(folder: Path, sums: list[dict], *, samples: int, temperature: float) -> tuple[float, str]:
    """Accuracy, and one response as an example."""
    repeated = [entry for entry in sums for _ in range(samples)]
    responses = respond(folder, [entry["question"] for entry in repeated], temperature=temperature)
    correct = [last_number(text) == int(entry["answer"]) for text, entry in zip(responses, repeated, strict=True)]
    return sum(correct) / len(correct), responses[0]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=existing_folder, required=True,
                        help="folder of the stages, and for summary.json")  # fmt: skip
    parser.add_argument("--models", type=existing_folder, nargs="+", required=True,
                        help="exported models; the first is the SFT model")  # fmt: skip
    parser.add_argument("--sums", type=number_type(int, at_least=1), default=50, help="number of sums of each length")
    options = parser.parse_args(arguments)
    with exit_on_mistake("evaluate"):
        evaluate(options)


def evaluate(options: argparse.Namespace) -> None:
    seen = seen_prompts(options.output)
    sums = {terms: unseen_sums(terms, options.sums, seen) for terms in TERMS}
    summary = {}
    print(f"{'':8}" + "".join(f"{terms:>8}" for terms in TERMS) + f"{'all':>8}   (numbers per sum)")
    for model in options.models:
        for decoding, samples, temperature in (("sampled", SAMPLES, 1.0), ("greedy", 1, 0.0)):
            results = {t: accuracy(model, sums[t], samples=samples, temperature=temperature) for t in TERMS}
            shares = {str(terms): round(share, 4) for terms, (share, _) in results.items()}
            shares["all"] = round(sum(shares.values()) / len(shares), 4)
            summary.setdefault(model.name, {})[decoding] = shares
            print(f"{model.name:8}" + "".join(f"{share:8.3f}" for share in shares.values()) + f"   {decoding}")
        print(f"    {sums[6][0]['question']}\n    {results[6][1]!r}")
    first, last = (summary[options.models[index].name] for index in (0, -1))
    for decoding in ("sampled", "greedy"):
        gain = 100 * (last[decoding]["all"] - first[decoding]["all"])
        print(f"{decoding}: {gain:+.1f} points by reinforcement learning")
    (options.output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
