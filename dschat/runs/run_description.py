"""The content of run.json: what was started, from which code, on what, and how it ended."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

import dschat
from dschat.arguments.secrets import is_secret_name, redacted, redacted_values
from dschat.distributed import collectives

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "peft", "accelerate")
# Environment variables that change how a run computes or communicates.
ENVIRONMENT = re.compile(
    r"(OMP|MKL|CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|HF|TRANSFORMERS|TOKENIZERS|DS|DSCHAT|VLLM|SLURM_(JOB_ID|NNODES|NTASKS))"
    r"(_|$)|(WORLD_SIZE|LOCAL_WORLD_SIZE|GOMP_SPINCOUNT|PYTHONHASHSEED|LD_PRELOAD)$"
)


def description(
    name: str, arguments: Mapping[str, Any], *, earlier: Mapping[str, Any] | None = None, first_step: int = 0
) -> dict[str, Any]:
    """Describe a run that starts now; passwords and keys are redacted.

    Args:
        earlier: run.json of the processes that this one resumes; their `sessions` are kept.
    """
    session = {"started": now(), "first_step": first_step, "command": redacted(shlex.join(sys.argv))}
    return {
        "name": name,
        "started": session["started"],
        "command": session["command"],
        "git": git_state(Path(dschat.__file__).parent),
        "arguments": redacted_values(arguments),
        "versions": {"python": platform.python_version(), "dschat": dschat.__version__}
        | {package: version(package) for package in PACKAGES},
        "devices": {"accelerator": get_accelerator().device_name(), "processes": collectives.world_size(),
                    "name": get_accelerator().current_device_name()},
        "environment": {variable: redacted(value) for variable, value in sorted(os.environ.items())
                        if ENVIRONMENT.match(variable) and not is_secret_name(variable)},
        "sessions": [*(earlier or {}).get("sessions", []), session],
    }  # fmt: skip


def ended(run: Mapping[str, Any], *, outcome: str, seconds: float) -> dict[str, Any]:
    """The description with the end of its last session."""
    *before, session = run["sessions"]
    session = session | {"ended": now(), "seconds": round(seconds, 3), "outcome": outcome}
    return {**run, "sessions": [*before, session]}


def earlier_description(path: Path) -> dict[str, Any] | None:
    """The run.json of an earlier process, or None if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("sessions"), list) else None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that holds the folder, and whether its tracked files differ; None outside of one."""
    try:
        commit, status = (
            subprocess.run(
                ["git", "-C", folder, *command], capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no", "."])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "modified": bool(status)}


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
