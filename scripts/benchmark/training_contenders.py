"""The contenders of the training benchmark, by the names of --contenders, --without and --with."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training_cases import KINDS
from training_process import TrainingProcess

FOLDER = Path(__file__).resolve().parent
# What can be left out or added: name → flag of the programs, its value without, its value with.
PARTS: dict[str, tuple[str, Any, Any]] = {
    "packing": ("remove_padding", False, True),
    "sharing": ("share_prompts", False, True),
    "compile": ("compile", False, True),
    "kernels": ("kernels", "torch", "liger"),
}


@dataclass(frozen=True)
class TrainingContender:
    """One way to train.

    Attributes:
        worker: script of its process.
        kinds: what it can train.
        flags: values of flags of the programs, where they are not the defaults; a flag that this version does not have
            is left out, and noted.
        trl: further arguments of TRL's configuration.
        checkout: root of another checkout of this suite, whose own worker runs; None: this one.
    """

    worker: str = "training_worker.py"
    kinds: tuple[str, ...] = KINDS
    flags: Mapping[str, Any] = field(default_factory=dict)
    trl: Mapping[str, Any] = field(default_factory=dict)
    checkout: Path | None = None

    @property
    def is_trl(self) -> bool:
        return self.worker == "trl_worker.py"

    def start(self, case: Mapping[str, Any], folder: Path, *, threads: int, trl_python: str | None) -> TrainingProcess:
        """Start its process with this case. Raises RuntimeError if that fails."""
        python = sys.executable
        if self.is_trl:
            if not trl_python:
                raise RuntimeError("--trl_python is not given")
            if not Path(trl_python).exists():
                raise RuntimeError(f"--trl_python {trl_python} does not exist")
            python = trl_python
        folder.mkdir(parents=True)
        path = folder / "case.json"
        path.write_text(json.dumps({**case, "folder": str(folder), "flags": dict(self.flags), "trl": dict(self.trl)}))
        scripts = self.checkout / "scripts" / "benchmark" if self.checkout else FOLDER
        return TrainingProcess(python, scripts / self.worker, path, threads=threads, log=folder / "log")


CONTENDERS = {
    "ours": TrainingContender(),
    "plain": TrainingContender(flags={flag: value for flag, value, _ in PARTS.values()}),
    "trl": TrainingContender("trl_worker.py", ("sft", "rm", "dpo", "grpo")),
    "trl-padding-free": TrainingContender("trl_worker.py", ("sft",), trl={"padding_free": True}),
}


def chosen_contenders(
    names: str, *, without: str, with_parts: str, checkout: str | None = None
) -> tuple[dict[str, TrainingContender], list[str]]:
    """The contenders of --contenders, --without, --with and --checkout by name, and a line for each unknown name."""
    chosen = {name: CONTENDERS[name] for name in names.split(",") if name in CONTENDERS}
    problems = [f"--contenders {name}: not one of {', '.join(CONTENDERS)}" for name in names.split(",")
                if name not in CONTENDERS]  # fmt: skip
    for option, sign, value, combinations in (("--without", "-", 1, without), ("--with", "+", 2, with_parts)):
        for combination in filter(None, combinations.split(",")):
            parts = combination.split("+")
            problems += [f"{option} {part}: not one of {', '.join(PARTS)}" for part in parts if part not in PARTS]
            flags = {PARTS[part][0]: PARTS[part][value] for part in parts if part in PARTS}
            chosen[f"ours {sign}{combination}"] = TrainingContender(flags=flags)
    if checkout:
        root = Path(checkout).resolve()
        chosen[f"ours @{root.name}"] = other = TrainingContender(checkout=root)
        if not (root / "scripts" / "benchmark" / other.worker).is_file():
            problems.append(f"--checkout {checkout}: it has no scripts/benchmark/{other.worker}")
    return chosen, problems
