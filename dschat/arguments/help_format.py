"""The text of --help: flags by group, each once, with the kind of its value and its default."""

from __future__ import annotations

import argparse
from typing import Any

from transformers.hf_argparser import string_to_bool

USAGE = "%(prog)s [--flag value ...]"
VALUES = {int: "N", float: "X", str: "TEXT"}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Omits spellings with dashes and separate --no_ lines; appends defaults that are not described in the text."""

    def add_argument(self, action: argparse.Action) -> None:
        if not _is_negation(action):
            super().add_argument(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        options = [option for option in action.option_strings if "-" not in option[2:]]
        if _is_switch(action):
            negation = [f"--no_{action.dest}"] if action.default is True else []
            return ", ".join([*options, *negation])
        return " ".join([", ".join(options), self._format_args(action, _value_of(action))]).rstrip()

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        return text if action.default in (None, "", [], argparse.SUPPRESS) else f"{text} ({_default_of(action)})"


def _is_switch(action: argparse.Action) -> bool:
    return isinstance(action.default, bool) and action.nargs in ("?", 0)


def _is_negation(action: argparse.Action) -> bool:
    return any(option.startswith("--no_") for option in action.option_strings) and action.nargs == 0


def _value_of(action: argparse.Action) -> str:
    if action.metavar:
        return str(action.metavar)
    if action.type is string_to_bool:
        return "{true,false}"
    return VALUES.get(action.type, "VALUE")


def _default_of(action: argparse.Action) -> str:
    value: Any = action.default
    if isinstance(value, bool):
        return "default: on" if value else "default: off"
    if isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    if isinstance(value, float):
        value = f"{value:g}".replace("e-0", "e-")
    return f"default: {value}"
