"""Soak test: kill step 3 repeatedly at random moments and compare its results with an uninterrupted run.

    bash scripts/quickstart.sh
    python tests/soak.py output/quickstart/ppo --kills 30 --output output/soak

Takes the flags of the quickstart's PPO run from its run.json. Every kill is a SIGKILL of all processes of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]

MAIN = ROOT / "training" / "step3_rlhf_finetuning" / "main.py"


def command(run: Path, output: Path) -> list[str]:
    """The command line of a run, into another folder, saved at every iteration and every few seconds."""
    values = json.loads((run / "run.json").read_text())["arguments"]
    values |= {
        "output_dir": str(output), "resume": "auto", "save_interval": 1, "save_minutes": 0.03, "keep_checkpoints": 2,
        "data_output_path": str(output.parent / "data"), "enable_tensorboard": False,
    }  # fmt: skip
    values.pop("local_rank", None)
    argv = []
    for name, value in values.items():
        if value is not None and value != []:
            argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return [sys.executable, str(MAIN), *argv]


def start(argv: list[str], log: Path) -> subprocess.Popen:
    with log.open("a") as file:
        return subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)


def progress(output: Path) -> int:
    folder = output / "checkpoints"
    return len(list(folder.iterdir())) and max((path.stat().st_mtime_ns for path in folder.iterdir()), default=0)


def run_with_kills(
    argv: list[str], output: Path, log: Path, *, kills: int, longest_delay: float, generator: random.Random
) -> tuple[int, int]:
    """Run a command again and again, killing it this many times; returns the number of kills and the last exit status.

    Args:
        output: the run's folder; each run is killed only after it has saved a new checkpoint.
        longest_delay: seconds between the checkpoint and the kill are drawn from 0 to this.
    """
    (output / "checkpoints").mkdir(parents=True, exist_ok=True)
    killed = 0
    while True:
        before, started = progress(output), time.monotonic()
        process = start(argv, log)
        while process.poll() is None and progress(output) == before:
            time.sleep(0.05)
        deadline = time.monotonic() + generator.uniform(0, longest_delay)
        while process.poll() is None and (killed >= kills or time.monotonic() < deadline):
            time.sleep(0.01)
        if process.poll() is not None:
            return killed, process.returncode
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        killed += 1
        newest = max(path.name for path in (output / "checkpoints").glob("step-*"))
        print(f"kill {killed} after {time.monotonic() - started:.1f} s, newest checkpoint {newest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run of step 3")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)

    start_time = time.monotonic()
    if start(command(options.run, output / "uninterrupted"), output / "uninterrupted.log").wait():
        sys.exit(f"the uninterrupted run failed: {output / 'uninterrupted.log'}")
    run_seconds = time.monotonic() - start_time
    print(f"uninterrupted: {run_seconds:.0f} s", flush=True)

    interrupted = output / "interrupted"
    kills, status = run_with_kills(
        command(options.run, interrupted), interrupted, output / "interrupted.log", kills=options.kills,
        longest_delay=0.5 * run_seconds / max(options.kills, 1), generator=random.Random(options.seed),
    )  # fmt: skip
    if status:
        sys.exit(f"the interrupted run failed: {output / 'interrupted.log'}")
    for folder in ("", "critic"):
        actual = load_file(interrupted / folder / "model.safetensors")
        expected = load_file(output / "uninterrupted" / folder / "model.safetensors")
        assert actual.keys() == expected.keys()
        differing = [name for name in expected if not torch.equal(actual[name], expected[name])]
        print(f"{folder or 'actor'}: {len(expected) - len(differing)} of {len(expected)} tensors are equal bit for bit")
        if differing:
            sys.exit(f"{', '.join(differing[:3])} differ")
    print(f"{kills} kills, and the weights equal those of the uninterrupted run")


if __name__ == "__main__":
    main()
