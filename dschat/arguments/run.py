"""Flags of every step: output, intervals, resume, devices, precision."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

from dschat.arguments.flags import flag

# Of --report_to: the names in accelerate.tracking, which are those of the packages.
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab")
MAX_TIMEOUT = 1e8  # seconds, 3 years; system timers overflow above it


@dataclass
class RunArguments:
    """Output, evaluation, checkpoints, resume and timeouts of a run."""

    _argument_group_name: ClassVar[str] = "run"
    output_dir: str = flag(
        "output/run", "Folder for metrics, samples, checkpoints and the exported model.", on_resume="apply"
    )
    seed: int = flag(
        1234,
        "Seed of data order, initialisation, dropout and sampling.",
        at_least=0,
        at_most=2**63 - 1,
        on_resume="refuse",
    )
    num_train_epochs: int = flag(1, "Epochs over the training data.", at_least=1, on_resume="apply")
    max_steps: int = flag(
        0,
        "Maximum number of optimizer steps (iterations in step 3); 0: no limit besides --num_train_epochs.",
        at_least=0,
        on_resume="apply",
    )
    eval_interval: int = flag(
        0, "Evaluate every N steps; 0: only before and after training.", at_least=0, on_resume="apply"
    )
    eval_iters: int = flag(
        0, "Maximum evaluation batches per device; 0: the whole evaluation set.", at_least=0, on_resume="apply"
    )
    best_metric: str | None = flag(
        None,
        "Evaluation metric by which the best model is kept in OUTPUT_DIR/best. Default: none, no model is kept.",
        on_resume="apply",
    )
    best_mode: Literal["max", "min"] = flag(
        "max", "Whether the maximum or the minimum of --best_metric is best.", needs=["best_metric"], on_resume="apply"
    )
    save_interval: int = flag(0, "Save a checkpoint every N steps; 0: none.", at_least=0, on_resume="apply")
    save_minutes: float = flag(0.0, "Save a checkpoint every N minutes; 0: none.", at_least=0, on_resume="apply")
    keep_checkpoints: int = flag(
        2, "Number of checkpoints to keep.", at_least=1, needs=["save_interval", "save_minutes"], on_resume="apply"
    )
    resume: str = flag(
        "never",
        "Checkpoint to resume from; auto: the newest valid one in OUTPUT_DIR, PATH: this one, never: start over.",
        on_resume="ignore",
    )
    max_bad_steps: int = flag(
        10,
        "Stop after N consecutive updates that were skipped because of non-finite numbers, and step 3 after N "
        "consecutive iterations in which no response got a score; 0: never.",
        at_least=0,
        on_resume="apply",
    )
    warn_sigma: float = flag(
        6.0,
        "Warn if loss or KL deviates from its recent mean by more than N standard deviations; 0: never.",
        at_least=0,
        on_resume="apply",
    )
    collective_timeout: float = flag(
        1800.0,
        "Seconds without a heartbeat of a rank, or without progress of any rank, before the run ends with a report.",
        above=0,
        at_most=MAX_TIMEOUT,
        on_resume="apply",
    )
    rendezvous_timeout: float = flag(
        600.0,
        "Seconds to wait for all ranks at the start, before the run ends and names the missing ones.",
        above=0,
        at_most=MAX_TIMEOUT,
        on_resume="apply",
    )
    resume_anyway: bool = flag(False, "Resume even if flags that identify the run have changed.", on_resume="ignore")
    logging_steps: int = flag(
        1, "Without a terminal: print training metrics every N steps (of step 3: iterations).",
        at_least=1, on_resume="apply",
    )  # fmt: skip
    report_to: list[str] = flag(
        ["tensorboard"],
        f"Experiment trackers, besides metrics.jsonl: {', '.join(TRACKERS)}; none: no tracker. Those other than "
        "tensorboard must be installed, and are configured by their own environment variables.",
        choices=(*TRACKERS, "none"), on_resume="apply",
    )  # fmt: skip
    run_name: str | None = flag(
        None, "Name of the run in trackers. Default: the name of OUTPUT_DIR.", on_resume="apply"
    )
    enable_tensorboard: bool = flag(
        False, "Adds tensorboard to --report_to, whose default has it.", on_resume="apply"
    )
    tensorboard_path: str | None = flag(
        None, "Folder of TensorBoard's event files. Default: OUTPUT_DIR/tensorboard.",
        needs=["report_to=tensorboard", "enable_tensorboard"], on_resume="apply",
    )  # fmt: skip
    local_rank: int = flag(
        -1, "Passed by the deepspeed launcher and ignored: the rank is read from the environment.", on_resume="ignore"
    )

    def problems(self) -> list[str]:
        problems = []
        if self.resume not in ("auto", "never") and not Path(self.resume).is_dir():
            problems.append(f"--resume {self.resume}: must be auto, never, or the folder of a checkpoint")
        if "none" in self.report_to and len(self.report_to) > 1:
            problems.append(f"--report_to {' '.join(self.report_to)}: none excludes the other trackers: remove it")
        problems += [
            f"--report_to {name}: the package {name} is not installed: pip install {name.replace('_', '-')}"
            for name in self.trackers if find_spec(name) is None
        ]  # fmt: skip
        problems += unwritable("--output_dir", self.output_dir)
        return problems + unwritable("--tensorboard_path", self.tensorboard_path)

    @property
    def trackers(self) -> list[str]:
        """The trackers of --report_to and --enable_tensorboard, each once."""
        names = [name for name in self.report_to if name != "none"]
        return list(dict.fromkeys([*names, "tensorboard"] if self.enable_tensorboard else names))


def unwritable(flag: str, folder: str | None) -> list[str]:
    """Why a folder cannot be created or written to. Creates nothing, since other settings may be invalid."""
    if folder is None:
        return []
    if folder.startswith("~"):  # the shell expands it after a space, but not after =
        return [f"{flag} {folder}: the shell does not expand ~ after =: write {flag} {folder}"]
    existing = Path(folder)
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        reason = f"{existing} is not a folder"
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
        "bf16", "Precision of weights and activations; Adam's states are always fp32.", on_resume="refuse"
    )
    offload: bool = flag(False, "Keep optimizer states (and ZeRO-3 parameters) in host memory.", on_resume="apply")
    gradient_checkpointing: bool = flag(
        False, "Recompute activations in the backward pass, which saves memory and costs time.", on_resume="apply"
    )
    max_tokens_per_micro_batch: int = flag(
        0,
        "Tokens per forward pass and device; 0: the batch size per device times the longest row of the step, and at "
        "least 8192 in passes without gradients. A longer row runs alone.",
        at_least=0, on_resume="apply",
    )  # fmt: skip
    remove_padding: bool = flag(
        True,
        "Run batches without padding, where the model allows it (found by a trial when it is loaded).",
        on_resume="apply",
    )
    share_prompts: bool = flag(
        True,
        "Compute a prompt once for all of its responses, in scoring and in updates.",
        needs=["remove_padding"], on_resume="apply",
    )  # fmt: skip
    compile: bool = flag(
        False,
        "Compile the layers of trained and frozen models with torch.compile, once per kind of layer and precision. "
        "Rollouts run uncompiled, and so does every model under ZeRO-3.",
        on_resume="apply",
    )
    kernels: Literal["auto", "torch", "liger"] = flag(
        "auto",
        "Attention without padding, norms, gates and rotary embeddings: on a CPU in C++ (auto) where a trial gives the "
        "model's own results, or in torch's operations (torch). liger: norms and MLPs of liger-kernel on CUDA, for the "
        "models that it supports.",
        on_resume="apply",
    )
    deterministic: bool = flag(False, "Use deterministic GPU operations where they exist.", on_resume="apply")
    deepspeed_config: str | None = flag(
        None, "JSON file merged over the generated DeepSpeed configuration. Default: none.", on_resume="apply"
    )

    def problems(self) -> list[str]:
        from deepspeed.accelerator import get_accelerator

        from dschat.distributed.deepspeed_overrides import override_problems

        problems = []
        if self.dtype == "fp16" and get_accelerator().device_name() == "cpu":
            problems.append("--dtype fp16: not supported on a CPU: use bf16 or fp32")
        if self.kernels == "liger":
            problems += _liger_problems(get_accelerator().device_name())
        if self.deepspeed_config:
            problems += override_problems(self.deepspeed_config, dtype=self.dtype, offload=self.offload)
        return problems


def _liger_problems(device: str) -> list[str]:
    """Why --kernels liger cannot be used, by the kind of device."""
    if device != "cuda":
        return [f"--kernels liger: its kernels need a CUDA device, but this is {device}: use --kernels auto"]
    if find_spec("liger_kernel") is None:
        return [
            "--kernels liger: liger-kernel is not installed: pip install liger-kernel (the extra dschat[liger]), or "
            "use --kernels auto"
        ]
    return []
