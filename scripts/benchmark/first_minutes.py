"""Time what a user waits for first, in several checkouts that take turns: help, start of step 3, tests of a module.

    python scripts/benchmark/first_minutes.py --checkout OTHER [--turns 5] [--json FILE]

"start" is the time from the call of step 3 on the quickstart's tiny model to the first finished iteration (rollout,
scoring and update), without evaluation. Every measurement is a process of its own; the checkouts alternate within each
turn, and the first turn of each is a warm-up. Reported are medians, of wall-clock and of processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from dschat.arguments.script_inputs import existing_folder, exit_on_mistake, new_file, number_type

ROOT = Path(__file__).resolve().parents[2]
STEP_3 = Path("training", "step3_rlhf_finetuning", "main.py")
TESTS = (Path("tests", "arguments", "test_arguments.py"), Path("tests", "training", "test_pair_settings.py"))
POLL = 0.02  # seconds
PATIENCE = 600.0  # seconds


def seconds_of(
    command: Sequence[str | Path], checkout: Path, *, until: Callable[[], bool] | None = None
) -> list[float]:
    """Wall-clock and processor seconds of a command in a checkout, to its end or until a condition holds.

    Raises: RuntimeError if it fails.
    """
    paths = (str(checkout), str(checkout / "tests" / "support"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    used, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            list(map(str, command)), cwd=checkout, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        while process.poll() is None and not (until and until()):
            if time.perf_counter() - start > PATIENCE:
                os.killpg(process.pid, signal.SIGKILL)
                raise RuntimeError(f"{command[1]} did not end in {PATIENCE:.0f} s")
            time.sleep(POLL)
        wall = time.perf_counter() - start
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        elif process.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(map(str, command))} failed in {checkout}:\n{output.read()[-2000:]}")
        process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return [wall, after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime]


def measure_start(checkout: Path, materials: Path) -> list[float]:
    """Seconds of step 3 until metrics.jsonl has the first iteration."""
    output = materials / "run"
    shutil.rmtree(output, ignore_errors=True)

    def has_iterated() -> bool:
        log = output / "metrics.jsonl"
        return log.exists() and '"phase": "train"' in log.read_text()

    model, prompts = materials / "model", materials / "data" / "prompts_rl.jsonl"
    return seconds_of([
        sys.executable, STEP_3, "--actor_model_name_or_path", model, "--critic_model_name_or_path", model, "--reward",
        "length?target=8", "--data_path", prompts, "--data_output_path", materials / "prepared", "--eval_fraction", "0",
        "--output_dir", output, "--max_steps", "3", "--per_device_generation_batch_size", "8",
        "--per_device_training_batch_size", "8", "--max_prompt_seq_len", "64", "--max_answer_seq_len", "16",
    ], checkout, until=has_iterated)  # fmt: skip


def make_materials(folder: Path) -> None:
    """The quickstart's tiny model, untrained, and its prompts."""
    quickstart = ROOT / "scripts" / "quickstart"
    subprocess.run([sys.executable, quickstart / "arithmetic_chats.py", "--output", folder / "data", "--seed", "1"],
                   check=True, capture_output=True)  # fmt: skip
    subprocess.run([sys.executable, quickstart / "make_model.py", "--data", folder / "data" / "sft_train.jsonl",
                    "--output", folder / "model", "--seed", "1"], check=True, capture_output=True)  # fmt: skip


def measurements(materials: Path) -> dict[str, Callable[[Path], list[float]]]:
    """Name → measurement in a checkout."""

    def measure_tests(checkout: Path, file: Path) -> list[float]:
        return seconds_of([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file], checkout)

    return {
        "--help of step 3": lambda checkout: seconds_of([sys.executable, STEP_3, "--help"], checkout),
        "start of step 3": lambda checkout: measure_start(checkout, materials),
        **{str(file): partial(measure_tests, file=file) for file in TESTS},
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=existing_folder, help="another checkout (git worktree add), to compare with")
    parser.add_argument("--turns", type=number_type(int, at_least=2), default=5, help="turns, the warm-up among them")
    parser.add_argument("--json", type=new_file, help="write a row for each measurement and checkout")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    checkouts = {"this": ROOT} | ({"other": options.checkout.resolve()} if options.checkout else {})
    rows = []
    with exit_on_mistake("first_minutes"), tempfile.TemporaryDirectory() as folder:
        make_materials(Path(folder))
        for name, measure in measurements(Path(folder)).items():
            turns: dict[str, list[list[float]]] = {checkout: [] for checkout in checkouts}
            for turn in range(options.turns):
                order = list(checkouts) if turn % 2 == 0 else list(reversed(checkouts))
                for checkout in order:
                    turns[checkout].append(measure(checkouts[checkout]))
            for checkout, values in turns.items():
                wall, processor = (statistics.median(column) for column in zip(*values[1:], strict=True))
                row = {"measurement": name, "checkout": checkout, "seconds": wall, "processor_seconds": processor}
                rows.append(row)
                print(f"{name:34} {checkout:6} {wall:6.2f} s  {processor:6.2f} s of processor", flush=True)
            if len(checkouts) == 2:
                this, other = rows[-2:]
                print(f"{name:34} ratio  {this['seconds'] / other['seconds']:6.2f}    "
                      f"{this['processor_seconds'] / other['processor_seconds']:6.2f}", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
