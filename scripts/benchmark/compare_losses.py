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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "scripts" / "quickstart"
PROCESSES = (1, 2)
STEPS = 3
JUDGE = f"{QUICKSTART / 'arithmetic_chats.py'}:judge"
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
    inputs = make_inputs(output)
    for processes in PROCESSES:
        train_one_model(inputs, output, processes)
        train_rlhf(inputs, output, processes)


class Inputs(NamedTuple):
    """Inputs of the programs.

    Attributes:
        data: folder of the quickstart's data.
        model: random weights.
        base: a briefly trained model with answers of different quality, for the later programs.
        pairs: preference pairs of its answers.
    """

    data: Path
    model: Path
    base: Path
    pairs: Path

    @property
    def sft_flags(self) -> list[str | Path]:
        return ["--max_seq_len", "80", "--data_path", self.data / "sft_train.jsonl", "--eval_data_path",
                self.data / "sft_eval.jsonl", "--data_split", "1,0,0", "--learning_rate", "4e-3"]  # fmt: skip


def make_inputs(output: Path) -> Inputs:
    """Make data and model, train the base model, and make pairs of its answers."""
    data, model, logs = output / "data", output / "model", output / "logs"
    execute(
        [sys.executable, QUICKSTART / "arithmetic_chats.py", "--output", data, "--seed", "1", "--sft_examples", "3200",
         "--pair_prompts", "100", "--rl_prompts", "192", "--eval_prompts", "32"], logs / "data.log"
    )  # fmt: skip
    execute([sys.executable, QUICKSTART / "make_model.py", "--data", data / "sft_train.jsonl", "--output", model,
             "--seed", "1"], logs / "model.log")  # fmt: skip
    inputs = Inputs(data, model, output / "base-1", output / "pairs" / "preferences.jsonl")
    train(
        "step1_supervised_finetuning", "base", output, 1,
        ["--model_name_or_path", model, "--per_device_train_batch_size", "32", *inputs.sft_flags], steps=100,
    )  # fmt: skip
    execute(
        [sys.executable, ROOT / "training" / "step2_reward_model_finetuning" / "make_preferences.py",
         "--model_name_or_path", inputs.base, "--output_dir", inputs.pairs.parent, "--seed", "1", "--dtype", "fp32",
         "--data_path", data / "prompts_train.jsonl", "--data_split", "0,0,1", "--judge", JUDGE,
         "--num_samples_per_prompt", "8", "--pairs_per_prompt", "4", *LENGTHS], logs / "pairs.log",
    )  # fmt: skip
    return inputs


def train_one_model(inputs: Inputs, output: Path, processes: int) -> None:
    """Steps 1 and 2."""
    batch = str(16 // processes)
    batches = ["--per_device_train_batch_size", batch, "--per_device_eval_batch_size", batch]
    train("step1_supervised_finetuning", "sft", output, processes,
          ["--model_name_or_path", inputs.model, *batches, *inputs.sft_flags])  # fmt: skip
    preferences = [*batches, "--model_name_or_path", inputs.base, "--data_path", inputs.pairs, "--data_split", "0,1,0",
                   "--eval_fraction", "0.1", "--max_seq_len", "80"]  # fmt: skip
    train("step2_reward_model_finetuning", "reward", output, processes, preferences)
    train("step2_dpo_finetuning", "dpo", output, processes, preferences)


def train_rlhf(inputs: Inputs, output: Path, processes: int) -> None:
    """Step 3: PPO on the reward model of one process, GRPO on the judge."""
    rollouts = [
        "--actor_model_name_or_path", inputs.base, "--data_path", inputs.data / "prompts_rl.jsonl",
        "--eval_data_path", inputs.data / "prompts_eval.jsonl", "--data_split", "0,0,1", *LENGTHS,
        "--per_device_training_batch_size", str(16 // processes), "--lr_scheduler_type", "constant",
    ]  # fmt: skip
    train(
        "step3_rlhf_finetuning", "ppo", output, processes,
        [*rollouts, "--reward_model_name_or_path", output / "reward-1", "--ppo_epochs", "2",
         "--per_device_generation_batch_size", str(32 // processes)],
    )  # fmt: skip
    train(
        "step3_rlhf_finetuning", "grpo", output, processes,
        [*rollouts, "--algorithm", "grpo", "--reward", JUDGE,
         "--num_samples_per_prompt", "4", "--per_device_generation_batch_size", str(8 // processes)],
    )  # fmt: skip


def lines_of(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl without times, rates and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    unstable = (
        "seconds_", "time", "tokens_per_second", "samples_per_second", "update_tokens_per_second",
        "update_samples_per_second", "mfu", "padding", "memory_gib", "peak_memory",
    )  # fmt: skip
    return [{name: value for name, value in line.items() if not name.startswith(unstable)} for line in lines]


def differences(before: Path, after: Path) -> list[str]:
    """One line for each number that differs between runs of the same name, and for each metric on one side only."""
    lines = []
    for folder in sorted(path.parent for path in before.glob("*/metrics.jsonl")):
        if not (after / folder.name / "metrics.jsonl").is_file():
            lines.append(f"{folder.name}: no metrics.jsonl after")
            continue
        old, new = lines_of(folder), lines_of(after / folder.name)
        if len(old) != len(new):
            lines.append(f"{folder.name}: {len(old)} lines before, {len(new)} after")
        for old_line, new_line in zip(old, new, strict=False):
            label = f"{folder.name} {old_line['phase']} {old_line['step']}"
            lines += [
                f"{label}: {name} {old_line[name]!r} -> {new_line[name]!r}"
                for name in old_line.keys() & new_line.keys() if old_line[name] != new_line[name]
            ]  # fmt: skip
            lines += [f"{label}: {name} is on one side only" for name in old_line.keys() ^ new_line.keys()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of this checkout's runs; must not exist")
    parser.add_argument("--against", type=Path, help="folder of another checkout's runs to compare with")
    options = parser.parse_args()
    if options.output.exists():
        parser.error(f"--output {options.output} exists: name a new folder")
    run_all(options.output.resolve())
    if options.against:
        differing = differences(options.against, options.output)
        print("\n".join(differing) or "no number differs")
        sys.exit(bool([line for line in differing if "one side only" not in line]))


if __name__ == "__main__":
    main()
