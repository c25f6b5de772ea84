"""The last lines of a run: which models it has exported, and commands to go on with them."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from dschat.distributed import collectives
from dschat.distributed.terminal import fitted_command

# Step → purpose and command; MODEL is the exported folder.
NEXT_COMMANDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "sft": (
        ("chat with it", "dschat chat MODEL"),
        ("reward model", 'deepspeed "$(dschat path reward)" --model_name_or_path MODEL --data_path PAIRS'),
        ("or DPO", 'deepspeed "$(dschat path dpo)" --model_name_or_path MODEL --data_path PAIRS'),
        ("or RL with a rule", 'deepspeed "$(dschat path rlhf)" --actor_model_name_or_path MODEL --algorithm grpo '
                              "--reward RULE --data_path PROMPTS"),
    ),
    "reward": (
        ("RLHF", 'deepspeed "$(dschat path rlhf)" --actor_model_name_or_path SFT_MODEL --critic_model_name_or_path '
                 "MODEL --data_path PROMPTS"),
        ("serve it", "dschat serve MODEL"),
    ),
    "dpo": (("chat with it", "dschat chat MODEL"),),
    "rlhf": (("chat with it", "dschat chat MODEL"),),
}  # fmt: skip


def print_next_commands(step: str, output_dir: str | Path, exported: Iterable[str]) -> None:
    """Print the exported folders and the next commands, on the main rank.

    Args:
        step: key of NEXT_COMMANDS.
        exported: subfolders of output_dir that hold models; "" is output_dir itself.
    """
    if collectives.is_main():
        print("\n".join(next_commands(step, output_dir, exported)), flush=True)


def next_commands(step: str, output_dir: str | Path, exported: Iterable[str]) -> list[str]:
    folders = [str(Path(output_dir, name)) for name in exported if Path(output_dir, name, "config.json").is_file()]
    model = shlex.quote(folders[0] if folders else str(Path(output_dir)))
    report = ("curves and samples", f"dschat report {shlex.quote(str(output_dir))}")
    program = "dschat" if shutil.which("dschat") else f"{shlex.quote(sys.executable)} -m dschat"
    lines = [f"exported: {', '.join(folders) or 'adapters only'}"]
    for purpose, command in (*NEXT_COMMANDS[step], report):
        command = command.replace("dschat ", f"{program} ").replace(" MODEL", f" {model}")
        lines += [f"  {purpose}:", fitted_command(command, indent="    ")]
    return lines
