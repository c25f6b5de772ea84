"""Completion scripts of the command `dschat` for bash, zsh and fish: subcommands, flags, and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dschat.arguments import PROGRAM_SETTINGS
from dschat.arguments.command_line import parser_of
from dschat.command import PROGRAMS

# Subcommand → settings, of the programs whose flags are dataclasses.
SETTINGS = {
    name: PROGRAM_SETTINGS[program]
    for name, path in PROGRAMS.items()
    if (program := Path(path).parent.name if Path(path).stem == "main" else Path(path).stem) in PROGRAM_SETTINGS
}


def flags_by_command() -> dict[str, list[str]]:
    """Subcommand → its flags without spellings with dashes, for the programs whose flags are dataclasses."""
    flags = {name: parser_of(settings, description="").flags() for name, settings in SETTINGS.items()}
    return {name: sorted(flag for flag in found if "-" not in flag) for name, found in flags.items()}


def bash(commands: Sequence[str], flags: Mapping[str, Sequence[str]]) -> str:
    """A bash function: subcommands first, then the flags of the subcommand; files for anything else."""
    cases = "\n".join(
        f"        {name}) words='{' '.join('--' + flag for flag in names)}' ;;" for name, names in flags.items()
    )
    return f"""_dschat() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words=''
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W '{" ".join(commands)}' -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
        path) words='{" ".join(commands)}' ;;
        completion) words='bash zsh fish' ;;
    esac
    if [[ $word == --* || ${{COMP_WORDS[1]}} == path || ${{COMP_WORDS[1]}} == completion ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _dschat dschat"""


def zsh(commands: Sequence[str], flags: Mapping[str, Sequence[str]]) -> str:
    """The bash function through zsh's emulation of bash completion."""
    emulation = "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit"
    return f"{emulation}\n{bash(commands, flags)}"


def fish(commands: Sequence[str], flags: Mapping[str, Sequence[str]]) -> str:
    lines = [f"complete -c dschat -n __fish_use_subcommand -f -a '{' '.join(commands)}'"]
    lines += [
        f"complete -c dschat -n '__fish_seen_subcommand_from {name}' -l {flag}"
        for name, names in flags.items()
        for flag in names
    ]
    return "\n".join(lines)


SCRIPTS: dict[str, Callable[[Sequence[str], Mapping[str, Sequence[str]]], str]] = {
    "bash": bash, "zsh": zsh, "fish": fish
}  # fmt: skip
