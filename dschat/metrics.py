"""What a run tells: console with progress and ETA, metrics.jsonl, samples.jsonl, run.json, TensorBoard.

Only the main rank writes; on the others every method does nothing.
"""

import json
import math
import platform
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch.utils.tensorboard import SummaryWriter

from dschat import launch
from dschat.secrets import redacted, stored_arguments
from dschat.terminal import printable

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "peft", "accelerate")


class RunLog:
    """The one logger of a run.

    Args:
        output_dir: folder of the run.
        name: the step's name, for the console and run.json.
        groups: the run's argument groups, written to run.json.
        total_steps: for the ETA.
        tensorboard: folder of event files, or None.
        finished_steps: steps that a resumed run has behind it; lines of later steps are taken out of the files. None:
            a new run, all lines are.
    """

    def __init__(self, output_dir: str, *, name: str, groups: Iterable[Any], total_steps: int,
                 tensorboard: str | None = None, finished_steps: int | None = None):  # fmt: skip
        self.name, self.total_steps, self.first_step = name, total_steps, finished_steps or 0
        self.started = time.monotonic()
        self.speaks = launch.is_main()
        self.writer, self.about = None, {}
        if not self.speaks:
            return
        self.folder = Path(output_dir)
        for file in ("metrics.jsonl", "samples.jsonl"):
            _keep_until(self.folder / file, -1 if finished_steps is None else finished_steps)
        if tensorboard is not None:
            self.writer = SummaryWriter(tensorboard, purge_step=None if finished_steps is None else finished_steps + 1)
        self.about = {
            "name": name,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "arguments": stored_arguments(groups),
            "versions": {"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
            "devices": {"accelerator": get_accelerator().device_name(), "processes": launch.world_size(),
                        "name": get_accelerator().current_device_name()},
        }  # fmt: skip
        (self.folder / "run.json").write_text(json.dumps(self.about, indent=1), encoding="utf-8")

    def metrics(self, step: int, values: Mapping[str, float], *, phase: str = "train") -> None:
        """Append one line to metrics.jsonl, one point a metric to TensorBoard, and show the line on the console."""
        if not self.speaks:
            return
        seconds = time.monotonic() - self.started
        line = {"step": step, "time": round(seconds, 3), "phase": phase}
        # JSON knows no NaN or infinity: null keeps the file readable and the gap visible.
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(f"{phase}/{name}", value, step)
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        progress = f"{phase} {step}/{self.total_steps}  {numbers}{self._remaining(step, seconds)}"
        print(printable(f"[{self.name}] {progress}"), flush=True)

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]], *, phase: str = "train") -> None:
        """Append rollouts to samples.jsonl: mappings with at least prompt, response and score."""
        if self.speaks:
            with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(
                    json.dumps({"step": step, "phase": phase, **row}, ensure_ascii=False) + "\n" for row in rows
                )

    def say(self, text: str) -> None:
        if self.speaks:
            print(printable(redacted(f"[{self.name}] {text}")), flush=True)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def _remaining(self, step: int, seconds: float) -> str:
        done = step - self.first_step
        if not done > 0 or step >= self.total_steps:
            return ""
        return f"  ETA {timedelta(seconds=round(seconds / done * (self.total_steps - step)))}"


def _keep_until(path: Path, step: int) -> None:
    """Keep the lines of a jsonl file up to this step, so that a resumed run does not write points twice."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().split(b"\n"):  # bytes: str.splitlines breaks lines inside of texts too
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line cut short when the run was killed
    path.write_bytes(b"".join(kept))
