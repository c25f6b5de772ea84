"""The flag reference, from the dataclasses of dschat.arguments: a page a program, a table a group."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dschat import arguments
from dschat.arguments.command_line import group_types

# Page → program, its settings.
PROGRAMS = {
    "sft": ("training/step1_supervised_finetuning/main.py", arguments.SFTSettings),
    "reward_model": ("training/step2_reward_model_finetuning/main.py", arguments.RewardModelSettings),
    "dpo": ("training/step2_dpo_finetuning/main.py", arguments.PreferenceSettings),
    "make_preferences": ("training/step2_reward_model_finetuning/make_preferences.py", arguments.PairSettings),
    "rlhf": ("training/step3_rlhf_finetuning/main.py", arguments.RLHFSettings),
}
INTRODUCTION = """Generated from `dschat/arguments`. `--help` prints the same; `--config FILE.yaml` reads flags from a \
file. "Resume" is the effect of a value that differs from the checkpoint's: `apply`: it is used and logged; `refuse`: \
an error, unless `--resume_anyway` is given; `ignore`: none.
"""


def write_flag_pages(folder: Path) -> None:
    """Write flags/NAME.md of every program into docs_dir."""
    (folder / "flags").mkdir(parents=True, exist_ok=True)
    for name, (program, settings) in PROGRAMS.items():
        (folder / "flags" / f"{name}.md").write_text(flag_page(program, settings), encoding="utf-8")


def flag_page(program: str, settings: type) -> str:
    tables = "\n".join(_table(group) for group in group_types(settings).values())
    return f"# Flags of {program}\n\n{INTRODUCTION}\n{tables}"


def _table(group: type) -> str:
    summary = _cell((group.__doc__ or "").partition("\n\n")[0])
    rows = "".join(f"| {' | '.join(row)} |\n" for row in _rows(group))
    header = "| flag | value | default | | resume |\n|---|---|---|---|---|\n"
    return f"## {group._argument_group_name}\n\n{summary}\n\n{header}{rows}"


def _rows(group: type) -> Iterator[tuple[str, ...]]:
    hints = get_type_hints(group)
    for field in dataclasses.fields(group):
        if not field.init:  # not a flag of this program, see dschat.arguments.flags.subset
            continue
        metadata = field.metadata
        needs = " or ".join(f"`--{need.replace('=', ' ')}`" for need in metadata["needs"])
        meaning = _cell(metadata["help"]) + (f" Only with {needs}." if needs else "")
        values = value_text(hints[field.name], metadata["choices"], metadata["bounds"])
        yield f"`--{field.name}`", values, default_text(field), meaning, metadata["on_resume"]


def value_text(hint: Any, choices: tuple[str, ...], bounds: Any) -> str:
    """The values of a flag: its choices, or its type and bounds."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (option for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is Literal:
        choices = get_args(hint)
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    if get_origin(hint) is list:
        return "texts"
    name = {bool: "true, false", int: "integer", float: "number", str: "text"}[hint]
    limits = {"≥": bounds.at_least, ">": bounds.above, "<": bounds.below, "≤": bounds.at_most}
    return ", ".join([name, *(f"{sign} {limit:g}" for sign, limit in limits.items() if limit is not None)])


def default_text(field: dataclasses.Field) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value in (None, "", []):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{' '.join(map(str, value)) if isinstance(value, list) else value}`"


def _cell(text: str) -> str:
    """Text as the content of a cell, with the characters escaped that have a meaning in Markdown."""
    return re.sub(r"([|*_\[\]`])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")
