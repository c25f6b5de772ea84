"""Extracts the training commands a shell script runs, by running it with stubs for all programs it calls."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from deepspeed.launcher.runner import parse_args as parse_launcher_args
from repository import ROOT

from dschat import arguments
from dschat.arguments.command_line import parse

PROGRAMS = ("main.py", "make_preferences.py")
# Records its own name and arguments. scripts/install.sh and the pipelines use the output of `-c` and pip: 1 for the GPU
# count, any number otherwise. The checksum has a pipe as input, which must be read.
STUB = """#!/bin/bash
case "$1 $2" in
    "-c "*device_count*) echo 1 ;;
    "-c "*hashlib*) cat >/dev/null; echo 3 ;;
    "-c "* | --version*) echo 3 ;;
    "-m pip") ;;
    *) printf '%s\\0' "${0##*/}" "$@" END-OF-COMMAND >>"$COMMANDS_FILE" ;;
esac
"""


@dataclass(frozen=True)
class Command:
    """One call of a training program.

    Attributes:
        program: file in training/.
        arguments: those of the program.
        processes: over all nodes.
        nodes: number of nodes.
    """

    program: Path
    arguments: tuple[str, ...]
    processes: int
    nodes: int

    @property
    def step(self) -> str:
        return self.program.parent.name

    def parsed(self, *more: str) -> Any:
        """The parsed settings, with additional flags. Raises SettingsError like the program."""
        name = self.program.stem if self.program.stem == "make_preferences" else self.step
        return parse(arguments.PROGRAM_SETTINGS[name], [*self.arguments, *more], description="")

    def flags(self) -> dict[str, object]:
        """Flag → value."""
        return arguments.flag_values(self.parsed())


def commands_of(script: str, *arguments: str, folder: Path) -> list[Command]:
    """Run a bash script's text in `folder`, with the repository's folders linked in, and record what it calls.

    Raises:
        AssertionError: the script fails, or the launcher rejects its arguments.
    """
    stubs = folder / "stubs"
    (stubs / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("deepspeed", "python", "torchrun", "srun", "mpirun", "ninja", "git"):
        (stubs / "bin" / name).write_text(STUB, encoding="utf-8")
        (stubs / "bin" / name).chmod(0o755)
    for path in ROOT.iterdir():
        if path.name in ("scripts", "tests", "training", "setup.py", "requirements.txt", "constraints.txt"):
            link = folder / path.name
            link.is_symlink() or link.symlink_to(path)
    record = folder / "commands"
    record.write_text("")
    environment = os.environ | {
        "PATH": f"{stubs / 'bin'}:/usr/bin:/bin", "VENV": str(stubs), "CXX": "bash", "PROCESSES": "",
        "OUTPUT": "", "COMMANDS_FILE": str(record), "HOSTFILE": "hostfile",
    }  # fmt: skip
    completed = subprocess.run(
        ["bash", "-c", script, "script", *arguments], cwd=folder, env=environment, text=True, capture_output=True,
        stdin=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip
    assert completed.returncode == 0, f"{script}\n{completed.stdout}\n{completed.stderr}"
    calls = [line.split("\0")[:-1] for line in record.read_text().split("END-OF-COMMAND\0") if line]
    commands = [_command(argv) for argv in calls if any(word.endswith(PROGRAMS) for word in argv)]
    return [command for command in commands if "training" in command.program.parts]


def _command(argv: list[str]) -> Command:
    launcher, arguments = argv[0], argv[1:]
    index = next(i for i, word in enumerate(arguments) if word.endswith(PROGRAMS))
    processes, nodes = 1, 1
    if launcher == "deepspeed":
        options = parse_launcher_args(arguments)
        nodes, processes = max(options.num_nodes, 1), max(options.num_nodes, 1) * max(options.num_gpus, 1)
        assert options.user_script == arguments[index], f"the launcher parses {options.user_script} as the program"
        assert options.user_args == arguments[index + 1 :]
    elif launcher == "torchrun":
        from torch.distributed.run import parse_args as parse_torchrun_args

        options = parse_torchrun_args(arguments)
        nodes = int(options.nnodes.split(":")[-1])
        processes = nodes * int(options.nproc_per_node)
        assert options.training_script == arguments[index]
    elif launcher == "srun":
        counts = dict(zip(arguments[:index], arguments[1:index], strict=False))
        nodes = int(counts["--nodes"])
        processes = nodes * int(counts["--ntasks-per-node"])
    program = ROOT / arguments[index][arguments[index].rindex("training/") :]
    assert program.is_file(), f"there is no {program}"
    return Command(program, tuple(arguments[index + 1 :]), processes, nodes)


def commands_in_text(path: Path) -> list[str]:
    """Lines of ```bash blocks that start a program of training/ or one of its recipes, continuations joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if re.search(r"\btraining/\S+\.(py|sh)\b", line) and not line.startswith("#")]


def settings_in_text(path: Path) -> dict[str, str]:
    """Name → content of the ```yaml blocks that begin with a comment that is their file's name."""
    text = path.read_text(encoding="utf-8")
    return dict(re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


@cache
def module_of(program: Path) -> ModuleType:
    """The program, imported as a module without running its main."""
    spec = importlib.util.spec_from_file_location(f"{program.parent.name}_{program.stem}", program)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
