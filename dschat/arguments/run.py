"""Flags of every step: output, intervals, resume, devices, precision."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from dschat.arguments.command_line import flag

LONGEST_WAIT = 1e8  # seconds, 3 years; timers of the system overflow somewhere above it


@dataclass
class RunArguments:
    """Output, evaluation, checkpoints, resume and timeouts of a run."""

    _argument_group_name: ClassVar[str] = "run"
    output_dir: str = flag("output/run", "folder for metrics, samples, checkpoints and the exported model")
    seed: int = flag(1234, "seeds data order, initialisation, dropout and sampling", at_least=0, at_most=2**63 - 1,
                     on_resume="refuse")  # fmt: skip
    num_train_epochs: int = flag(1, "passes over the training data", at_least=1)
    max_steps: int = flag(0, "stop after this many steps; 0: as the epochs say", at_least=0)
    eval_interval: int = flag(0, "evaluate every so many steps; 0: before and after training only", at_least=0)
    eval_iters: int = flag(0, "evaluation batches per device; 0: the whole evaluation set", at_least=0)
    best_metric: str | None = flag(
        None, "keep the model whose evaluation is best by this metric in OUTPUT_DIR/best; default: none"
    )
    best_mode: Literal["max", "min"] = flag("max", "whether more of it is better", needs=["best_metric"])
    save_interval: int = flag(0, "write a resumable checkpoint every so many steps; 0: none", at_least=0)
    save_minutes: float = flag(0.0, "write one every so many minutes, between two updates; 0: none", at_least=0)
    keep_checkpoints: int = flag(2, "how many checkpoints to keep", at_least=1, needs=["save_interval", "save_minutes"])
    resume: str = flag(
        "never", "auto: go on from the newest checkpoint of OUTPUT_DIR that verifies; its path; or never",
        on_resume="ignore",
    )
    max_bad_steps: int = flag(
        10, "stop after so many updates in a row that were skipped, as a number was not finite; 0: never", at_least=0
    )
    warn_sigma: float = flag(6.0, "warn of a loss or KL so many standard deviations off; 0: never", at_least=0)
    collective_timeout: float = flag(
        1800.0, "seconds that a rank may be silent, or all without progress, before the run ends with a report",
        above=0, at_most=LONGEST_WAIT,
    )
    rendezvous_timeout: float = flag(
        600.0, "seconds that ranks may be missing when a run starts, before it ends and names them",
        above=0, at_most=LONGEST_WAIT,
    )
    resume_anyway: bool = flag(
        False, "resume although flags have changed that make another run of it", on_resume="ignore"
    )
    enable_tensorboard: bool = flag(False, "write TensorBoard event files")
    tensorboard_path: str | None = flag(
        None, "folder of the event files; default: OUTPUT_DIR/tensorboard", needs=["enable_tensorboard"]
    )
    local_rank: int = flag(
        -1, "set by the deepspeed launcher; ignored, the environment says it too", on_resume="ignore"
    )

    def problems(self) -> list[str]:
        problems = []
        if self.resume not in ("auto", "never") and not Path(self.resume).is_dir():
            problems.append(f"--resume {self.resume}: wants auto, never, or the folder of a checkpoint")
        problems += unwritable("--output_dir", self.output_dir)
        return problems + unwritable("--tensorboard_path", self.tensorboard_path)


def unwritable(flag: str, folder: str | None) -> list[str]:
    """Why a folder cannot be created or written to. Creates nothing, since other settings may be invalid."""
    if folder is None:
        return []
    if folder.startswith("~"):  # the shell expands it after a space, and not after =
        return [f"{flag} {folder}: the shell has not expanded the ~: write {flag} and {folder} with a space between"]
    existing = Path(folder)
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        reason = f"{existing} is no folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        reason = f"no permission to write into {existing}, or it is mounted read-only"
    else:
        return []
    return [f"{flag} {folder}: cannot be written ({reason}); name another folder"]


@dataclass
class DeviceArguments:
    """Precision, offload and DeepSpeed configuration."""

    _argument_group_name: ClassVar[str] = "devices"
    dtype: Literal["bf16", "fp16", "fp32"] = flag(
        "bf16", "precision of weights and activations; Adam's states are fp32",
        on_resume="refuse",
    )
    offload: bool = flag(False, "keep optimizer states (and ZeRO-3 parameters) in host memory")
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass to save memory")
    deterministic: bool = flag(False, "on GPUs: operations that give the same bits every time, where there are some")
    deepspeed_config: str | None = flag(None, "JSON file merged over the generated DeepSpeed configuration")

    def problems(self) -> list[str]:
        from deepspeed.accelerator import get_accelerator

        from dschat.distributed.deepspeed_overrides import override_problems

        problems = []
        if self.dtype == "fp16" and get_accelerator().device_name() == "cpu":
            problems.append("--dtype fp16: a CPU cannot train in it; take bf16 or fp32")
        if self.deepspeed_config:
            problems += override_problems(self.deepspeed_config, dtype=self.dtype, offload=self.offload)
        return problems
