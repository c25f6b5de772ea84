"""The command `dschat`: every program of the suite by a short name, in a checkout or installed from a wheel.

    dschat sft --model_name_or_path ... --data_path ...      one process; for several devices:
    deepspeed "$(dschat path sft)" --model_name_or_path ...
    dschat recipes [TEXT ...]                                recipes whose path or purpose contains the texts
    dschat completion bash|zsh|fish                          a completion script for the shell
"""

from __future__ import annotations

import ast
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dschat import __version__

# Subcommand → program, relative to the folder that holds training/ and scripts/.
PROGRAMS = {
    "sft": "training/step1_supervised_finetuning/main.py",
    "reward": "training/step2_reward_model_finetuning/main.py",
    "preferences": "training/step2_reward_model_finetuning/make_preferences.py",
    "dpo": "training/step2_dpo_finetuning/main.py",
    "rlhf": "training/step3_rlhf_finetuning/main.py",
    "chat": "scripts/chat.py",
    "report": "scripts/report.py",
    "doctor": "scripts/doctor.py",
    "serve": "scripts/serve_reward_model.py",
    "replay": "scripts/replay.py",
    "merge": "scripts/merge_adapters.py",
    "push": "scripts/push_to_hub.py",
    "evaluate": "scripts/evaluate_with_lm_eval.py",
}
PACKAGE = Path(__file__).resolve().parent


def programs_folder() -> Path:
    """The checkout, or in an installed wheel the copies that setup.py puts into the package."""
    return PACKAGE.parent if (PACKAGE.parent / "training").is_dir() else PACKAGE / "programs"


def program_path(name: str) -> Path:
    return programs_folder() / PROGRAMS[name]


def summary_of(path: Path) -> str:
    """The first line of a program's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def run_program(name: str, arguments: Sequence[str]) -> None:
    """Run a program in this process as `python PROGRAM ARGUMENTS` would."""
    path = program_path(name)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def help_text() -> str:
    lines = [f"  {name:<12} {summary_of(program_path(name))}" for name in PROGRAMS]
    lines += [f"  {name:<12} {(function.__doc__ or '').partition(chr(10))[0]}" for name, function in COMMANDS.items()]
    return "\n".join([
        f"usage: dschat COMMAND [--flag value ...]        dschat {__version__}", "",
        *lines, "",
        "dschat COMMAND --help shows the flags of a command. A command runs in one process; on several devices:",
        '  deepspeed "$(dschat path sft)" --flag value ...',
    ])  # fmt: skip


def print_path(names: Sequence[str]) -> int:
    """Print the path of a command's program, for a launcher: deepspeed "$(dschat path sft)" ..."""
    if len(names) != 1 or names[0] not in PROGRAMS:
        print(f"dschat path: name one of {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    print(program_path(names[0]))
    return 0


def print_recipes(texts: Sequence[str]) -> int:
    """List recipes: path and purpose of each whose path or purpose contains all given texts."""
    training = programs_folder() / "training"
    for path in sorted(path for kind in ("sh", "yaml") for path in training.glob(f"*/training_scripts/**/*.{kind}")):
        line = f"{path}\n    {_purpose_of(path)}"
        if all(text.lower() in line.lower() for text in texts):
            print(line)
    return 0


def _purpose_of(recipe: Path) -> str:
    """The first comment of a recipe that is not an interpreter line."""
    comments = (line[1:].strip() for line in recipe.read_text(encoding="utf-8").splitlines()
                if line.startswith("#") and not line.startswith("#!"))  # fmt: skip
    return next(comments, "")


def print_completion(shells: Sequence[str]) -> int:
    """Print a completion script, to be evaluated by the shell: eval "$(dschat completion bash)" (bash, zsh, fish)."""
    from dschat.completion import SCRIPTS, flags_by_command  # builds every parser: a second

    if len(shells) != 1 or shells[0] not in SCRIPTS:
        print(f"dschat completion: name one of {', '.join(SCRIPTS)}", file=sys.stderr)
        return 2
    print(SCRIPTS[shells[0]]([*PROGRAMS, *COMMANDS], flags_by_command()))
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "path": print_path,
    "recipes": print_recipes,
    "completion": print_completion,
}


def main() -> int:
    name, arguments = (sys.argv[1] if len(sys.argv) > 1 else "--help"), sys.argv[2:]
    if name in ("-h", "--help", "help"):
        print(help_text())
    elif name == "--version":
        print(f"dschat {__version__}")
    elif name in PROGRAMS:
        run_program(name, arguments)
    elif name in COMMANDS and not {"-h", "--help"} & set(arguments):
        return COMMANDS[name](arguments)
    elif name in COMMANDS:
        print(COMMANDS[name].__doc__)
    else:
        print(f"dschat: unknown command {name!r}: choose from {', '.join([*PROGRAMS, *COMMANDS])}", file=sys.stderr)
        return 2
    return 0


def entry_point() -> None:
    """The console script; a closed pipe (`dschat recipes | head`) ends it quietly."""
    try:
        sys.exit(main())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    entry_point()
