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
from repository import ROOT
from safetensors.torch import load_file

MAIN = ROOT / "training" / "step3_rlhf_finetuning" / "main.py"


def command(run: Path, output: Path) -> list[str]:
    """The command line of a run, into another folder, saved at every iteration and every few seconds."""
    values = json.loads((run / "run.json").read_text())["arguments"]
    values |= {
        "output_dir": str(output), "resume": "auto", "save_interval": 1, "save_minutes": 0.03, "keep_checkpoints": 2,
        "data_output_path": str(output.parent / "data"), "enable_tensorboard": False,
    }  # fmt: skip
    values.pop("local_rank", None)
    words = []
    for name, value in values.items():
        if value is not None and value != []:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return [sys.executable, str(MAIN), *words]


def start(words: list[str], log: Path) -> subprocess.Popen:
    with log.open("a") as file:
        return subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)


def progress(output: Path) -> int:
    folder = output / "checkpoints"
    return len(list(folder.iterdir())) and max((path.stat().st_mtime_ns for path in folder.iterdir()), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run of step 3")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    chance = random.Random(options.seed)

    begun = time.monotonic()
    if start(command(options.run, output / "unbroken"), output / "unbroken.log").wait():
        sys.exit(f"the unbroken run failed: {output / 'unbroken.log'}")
    whole = time.monotonic() - begun
    print(f"unbroken: {whole:.0f} s", flush=True)

    broken, kills = output / "broken", 0
    (broken / "checkpoints").mkdir(parents=True, exist_ok=True)
    while True:
        before, started = progress(broken), time.monotonic()
        process = start(command(options.run, broken), output / "broken.log")
        # Wait for a new checkpoint first, or the run would never finish; then kill at a random time.
        while process.poll() is None and progress(broken) == before:
            time.sleep(0.05)
        deadline = time.monotonic() + chance.uniform(0, 0.5 * whole / max(options.kills, 1))
        while process.poll() is None and (kills >= options.kills or time.monotonic() < deadline):
            time.sleep(0.01)
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        newest = max(path.name for path in (broken / "checkpoints").glob("step-*"))
        print(f"kill {kills} after {time.monotonic() - started:.1f} s, newest checkpoint {newest}", flush=True)
    if process.returncode:
        sys.exit(f"the broken run failed: {output / 'broken.log'}")
    for folder in ("", "critic"):
        ours, theirs = (load_file(run / folder / "model.safetensors") for run in (broken, output / "unbroken"))
        assert ours.keys() == theirs.keys()
        apart = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        print(f"{folder or 'actor'}: {len(theirs) - len(apart)} of {len(theirs)} tensors are equal bit for bit")
        if apart:
            sys.exit(f"{', '.join(apart[:3])} differ")
    print(f"{kills} kills, and the weights are those of the unbroken run")


if __name__ == "__main__":
    main()
