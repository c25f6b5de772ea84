"""Regression check: three steps of every program, on one and two processes, compared bit for bit.

    git worktree add ../before main
    python ../before/scripts/benchmark/compare_losses.py --output /tmp/before
    python scripts/benchmark/compare_losses.py --output /tmp/after --against /tmp/before

Every run uses the quickstart's data and model (CPU, float32, one thread a process). All lines of metrics.jsonl
are compared, except times and rates; metrics on one side only are listed. Exit status 1 if a number differs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "scripts" / "quickstart"
PROCESSES = (1, 2)
STEPS = 3
LENGTHS = ["--max_prompt_seq_len", "48", "--max_answer_seq_len", "32"]


def execute(command: list[str | Path], log: Path) -> None:
    """Run a command in this checkout; SystemExit with the end of its log if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    with log.open("w", encoding="utf-8") as file:
        failed = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
    if failed:
        sys.exit(f"{' '.join(map(str, command))}\nfailed:\n{log.read_text(encoding='utf-8')[-3000:]}")


def train(step: str, name: str, output: Path, processes: int, flags: list, *, steps: int = STEPS) -> Path:
    """Run this many optimizer steps (iterations for step 3) of training/step; returns the run's folder."""
    folder = output / f"{name}-{processes}"
    program = ROOT / "training" / step / "main.py"
    shared = ["--output_dir", folder, "--max_steps", steps, "--seed", 1, "--dtype", "fp32", "--eval_iters", 2]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", processes, "--master_port", port]
    execute([str(word) for word in [*launcher, program, *shared, *flags]], output / "logs" / f"{folder.name}.log")
    return folder


def run_all(output: Path) -> None:
    """Run every program for each number of processes; batch sizes are global."""
    data, model, pairs = output / "data", output / "model", output / "pairs"
    execute(
        [sys.executable, QUICKSTART / "arithmetic_chats.py", "--output", data, "--seed", "1", "--sft_examples", "3200",
         "--pair_prompts", "100", "--rl_prompts", "192", "--eval_prompts", "32"], output / "logs" / "data.log"
    )  # fmt: skip
    execute([sys.executable, QUICKSTART / "make_model.py", "--data", data / "sft_train.jsonl", "--output", model,
             "--seed", "1"], output / "logs" / "model.log")  # fmt: skip
    sft_data = [
        "--max_seq_len", "80", "--data_path", data / "sft_train.jsonl", "--eval_data_path", data / "sft_eval.jsonl",
        "--data_split", "1,0,0", "--learning_rate", "4e-3",
    ]  # fmt: skip
    # The later programs need a model that gives answers of different quality.
    base = train(
        "step1_supervised_finetuning", "base", output, 1,
        ["--model_name_or_path", model, "--per_device_train_batch_size", "32", *sft_data], steps=100,
    )  # fmt: skip
    judge = f"{QUICKSTART / 'arithmetic_chats.py'}:judge"
    execute(
        [sys.executable, ROOT / "training" / "step2_reward_model_finetuning" / "make_preferences.py",
         "--model_name_or_path", base, "--output_dir", pairs, "--seed", "1", "--dtype", "fp32", "--data_path",
         data / "prompts_train.jsonl", "--data_split", "0,0,1", "--judge", judge, "--num_samples_per_prompt", "8",
         "--pairs_per_prompt", "4", *LENGTHS], output / "logs" / "pairs.log",
    )  # fmt: skip
    for processes in PROCESSES:
        batch = str(16 // processes)
        batches = ["--per_device_train_batch_size", batch, "--per_device_eval_batch_size", batch]
        train("step1_supervised_finetuning", "sft", output, processes,
              ["--model_name_or_path", model, *batches, *sft_data])  # fmt: skip
        chosen = [*batches, "--model_name_or_path", base, "--data_path", pairs / "preferences.jsonl", "--data_split",
                  "0,1,0", "--eval_fraction", "0.1", "--max_seq_len", "80"]  # fmt: skip
        train("step2_reward_model_finetuning", "reward", output, processes, chosen)
        train("step2_dpo_finetuning", "dpo", output, processes, chosen)
        rollouts = [
            "--actor_model_name_or_path", base, "--data_path", data / "prompts_rl.jsonl",
            "--eval_data_path", data / "prompts_eval.jsonl", "--data_split", "0,0,1", *LENGTHS,
            "--per_device_training_batch_size", batch, "--lr_scheduler_type", "constant",
        ]  # fmt: skip
        train(
            "step3_rlhf_finetuning", "ppo", output, processes,
            [*rollouts, "--reward_model_name_or_path", output / "reward-1", "--ppo_epochs", "2",
             "--per_device_generation_batch_size", str(32 // processes)],
        )  # fmt: skip
        train(
            "step3_rlhf_finetuning", "grpo", output, processes,
            [*rollouts, "--algorithm", "grpo", "--reward", judge,
             "--num_samples_per_prompt", "4", "--per_device_generation_batch_size", str(8 // processes)],
        )  # fmt: skip


def lines_of(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl without times and rates."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    unstable = ("seconds_", "time", "tokens_per_second")
    return [{name: value for name, value in line.items() if not name.startswith(unstable)} for line in lines]


def differences(before: Path, after: Path) -> list[str]:
    """One line for each number that differs between runs of the same name, and for each metric on one side only."""
    found = []
    for folder in sorted(path.parent for path in before.glob("*/metrics.jsonl")):
        old, new = lines_of(folder), lines_of(after / folder.name)
        if len(old) != len(new):
            found.append(f"{folder.name}: {len(old)} lines before, {len(new)} after")
        for was, now in zip(old, new, strict=False):
            place = f"{folder.name} {was['phase']} {was['step']}"
            found += [f"{place}: {name} {was[name]!r} -> {now[name]!r}" for name in was.keys() & now.keys()
                      if was[name] != now[name]]  # fmt: skip
            found += [f"{place}: {name} is on one side only" for name in was.keys() ^ now.keys()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of this checkout's runs; must not exist")
    parser.add_argument("--against", type=Path, help="folder of another checkout's runs to compare with")
    options = parser.parse_args()
    if options.output.exists():
        parser.error(f"--output {options.output} exists: name a new folder")
    run_all(options.output.resolve())
    if options.against:
        found = differences(options.against, options.output)
        print("\n".join(found) or "no number differs")
        sys.exit(bool([line for line in found if "one side only" not in line]))


if __name__ == "__main__":
    main()
