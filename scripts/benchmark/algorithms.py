"""Compare step 3's algorithms on the quickstart's task, with its gold reward and equal numbers of responses.

    python scripts/benchmark/algorithms.py --json results.jsonl

For every seed: the quickstart's data, model and SFT (reused from the output folder), then a run of step 3 for each
algorithm. Gold reward and accuracy are measured on responses to held-out sums, sampled at temperature 1, before and
after. A row of the JSON file: algorithm, seed, gold_reward_start, gold_reward_end, accuracy_end, seconds (of step 3,
including loading and exporting).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "scripts" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

from summarize import evaluate  # noqa: E402

from dschat.arguments.script_inputs import read_json_lines  # noqa: E402

SFT_STEPS, SFT_BATCH = 400, 64
RESPONSES, MINIBATCH = 128, 64  # per iteration, per update
# Flags of each algorithm, besides the shared ones.
ALGORITHMS = {
    "ppo": {"critic_learning_rate": 1e-3},
    "grpo": {},
    "dr_grpo": {},
    "rloo": {},
    "reinforce++": {},
    "reinforce++_baseline": {},
    "remax": {},
    "opo": {},
}
# Responses per prompt where more than one: an iteration has 128 / this many prompts.
SAMPLES = {"grpo": 8, "dr_grpo": 8, "rloo": 4, "reinforce++_baseline": 8, "opo": 8}


def run(program: str, flags: dict[str, object], log: Path) -> float:
    """Run a program with these flags; returns its seconds. Raises SystemExit with the end of its log if it fails."""
    command = [sys.executable, str(ROOT / program)]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        failed = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        ).returncode
    if failed:
        sys.exit(f"{' '.join(command)}\nfailed:\n{log.read_text(encoding='utf-8')[-3000:]}")
    return time.perf_counter() - start


def prepare(folder: Path, seed: int, iterations: int) -> None:
    """Create folder/data, folder/model and folder/sft as in the quickstart."""
    if (folder / "sft" / "model.safetensors").exists():
        return
    data = folder / "data"
    run("scripts/quickstart/arithmetic_chats.py",
        {"output": data, "seed": seed, "sft_examples": SFT_STEPS * SFT_BATCH, "rl_prompts": iterations * RESPONSES},
        folder / "logs" / "data.log")  # fmt: skip
    model = {"data": data / "sft_train.jsonl", "output": folder / "model", "seed": seed}
    run("scripts/quickstart/make_model.py", model, folder / "logs" / "model.log")
    run("training/step1_supervised_finetuning/main.py", {
        "model_name_or_path": folder / "model", "output_dir": folder / "sft", "seed": seed, "dtype": "fp32",
        "data_path": data / "sft_train.jsonl", "eval_data_path": data / "sft_eval.jsonl", "max_seq_len": 80,
        "per_device_train_batch_size": SFT_BATCH, "eval_iters": 1, "learning_rate": 4e-3, "adam_beta2": 0.99,
        "num_warmup_steps": SFT_STEPS // 20, "zero_stage": 0,
    }, folder / "logs" / "sft.log")  # fmt: skip


def train(algorithm: str, folder: Path, seed: int, iterations: int) -> tuple[Path, float]:
    """Run step 3; returns its output folder and seconds."""
    output, samples = folder / algorithm, SAMPLES.get(algorithm, 1)
    seconds = run("training/step3_rlhf_finetuning/main.py", {
        "algorithm": algorithm, "num_samples_per_prompt": samples,
        "actor_model_name_or_path": folder / "sft", "output_dir": output, "seed": seed, "dtype": "fp32",
        "reward": f"{QUICKSTART / 'arithmetic_chats.py'}:judge",
        "data_path": folder / "data" / "prompts_rl.jsonl", "eval_fraction": 0.0,
        "max_prompt_seq_len": 48, "max_answer_seq_len": 32,
        "per_device_generation_batch_size": RESPONSES // samples, "per_device_training_batch_size": MINIBATCH,
        "ppo_epochs": 2, "max_steps": iterations, "actor_learning_rate": 3e-4, "kl_coef": 0.0,
        "lr_scheduler_type": "constant", "missing_eos_penalty": 1, "actor_zero_stage": 0, "critic_zero_stage": 0,
        **ALGORITHMS[algorithm],
    }, folder / "logs" / f"{algorithm}.log")  # fmt: skip
    return output, seconds


def print_table(rows: list[dict]) -> None:
    """Print a table of means over seeds, with the lowest gold reward in brackets."""
    print(f"\n{'algorithm':22}{'gold before':>12}{'gold after':>18}{'accuracy':>10}{'seconds':>9}")
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        algorithm_rows = [row for row in rows if row["algorithm"] == algorithm]
        before, after, accuracy, seconds = (
            [row[name] for row in algorithm_rows]
            for name in ("gold_reward_start", "gold_reward_end", "accuracy_end", "seconds")
        )
        mean = statistics.mean
        print(f"{algorithm:22}{mean(before):12.3f}{mean(after):10.3f} ({min(after):.3f}){mean(accuracy):10.3f}"
              f"{mean(seconds):9.0f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file of the rows, one JSON object a line")
    parser.add_argument("--output", type=Path, default=Path("output/algorithms"), help="folder of data and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=["ppo", "grpo", "rloo", "reinforce++"])
    parser.add_argument("--iterations", type=int, default=50, help=f"rollouts of {RESPONSES} responses")
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        folder = (options.output / f"seed-{seed}").resolve()
        prepare(folder, seed, options.iterations)
        prompts = read_json_lines(folder / "data" / "prompts_eval.jsonl")
        before, _ = evaluate(folder / "sft", prompts, samples=4, seed=seed)
        for algorithm in options.algorithms:
            output, seconds = train(algorithm, folder, seed, options.iterations)
            after, responses = evaluate(output, prompts, samples=4, seed=seed)
            rows.append({
                "algorithm": algorithm, "seed": seed, "gold_reward_start": round(before["gold_reward"], 4),
                "gold_reward_end": round(after["gold_reward"], 4), "accuracy_end": round(after["accuracy"], 4),
                "seconds": round(seconds, 1),
            })  # fmt: skip
            print(json.dumps(rows[-1]), "|", prompts[0]["prompt"], "->", responses[0], flush=True)
            if options.json:
                options.json.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print_table(rows)


if __name__ == "__main__":
    main()
