"""Parse the command line and an optional YAML file into dataclasses; report all mistakes in one message."""

import argparse
import copy
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from transformers import HfArgumentParser

from dschat.arguments.flags import invalid_values, out_of_bounds, with_defaults, without_effect
from dschat.arguments.help_format import USAGE, HelpFormatter
from dschat.arguments.other_suites import translate
from dschat.arguments.secrets import redacted
from dschat.arguments.yaml_config import YamlFlags, format_value, read_yaml_flags, unknown_flag
from dschat.distributed.terminal import printable

Settings = TypeVar("Settings")


class SettingsError(ValueError):
    """Invalid settings; the message lists every mistake with its remedy, secrets redacted."""

    def __init__(self, message: str) -> None:
        super().__init__(redacted(message))


class SuiteParser(HfArgumentParser):
    """HfArgumentParser that collects all mistakes instead of exiting at the first one."""

    def __init__(self, groups: Sequence[type], **kwargs: Any):
        self.mistakes: list[str] = []
        self.add_locations: Callable[[Sequence[str]], Sequence[str]] = list  # of flags that a file sets
        super().__init__(groups, allow_abbrev=False, formatter_class=HelpFormatter, usage=USAGE, **kwargs)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            reason = error.message if len(arg_string) <= 200 and arg_string.isprintable() else "cannot be read"
            self.mistakes.append(f"{action.option_strings[0]} {format_value(arg_string)}: {reason}")
            return action.default

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            choices = ", ".join(map(str, action.choices))
            self.mistakes.append(f"{action.option_strings[0]} {format_value(value)}: choose one of {choices}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        values = super()._get_values(action, arg_strings)
        # An invalid choice has been reported; the code that follows needs a valid one.
        chosen = values if isinstance(values, list) else [values]
        return action.default if action.choices and not set(chosen) <= set(action.choices) else values

    @staticmethod
    def _parse_dataclass_field(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
        plain = copy.copy(field)  # argparse must not get the bounds that flag() put into the metadata
        plain.metadata = {"help": field.metadata["help"]}
        if field.metadata["choices"]:
            plain.metadata["choices"] = list(field.metadata["choices"])
        HfArgumentParser._parse_dataclass_field(parser, plain)

    def error(self, message: str) -> None:
        raise_mistakes(self.add_locations([*self.mistakes, message]))

    def flags(self) -> dict[str, argparse.Action]:
        return {
            option[2:]: action for action in self._actions for option in action.option_strings if option[:2] == "--"
        }

    def unknown(self, flag: str) -> str:
        return unknown_flag(flag, self.flags())


def parse(
    settings: type[Settings],
    argv: Sequence[str] | None = None,
    *,
    description: str,
    check: Callable[[Settings], list[str]] | None = None,
    warn: Callable[[Settings], list[str]] | None = None,
) -> Settings:
    """Read the flags of one step into its settings, a dataclass whose fields are groups of flags.

    A YAML file given by --config is read first; flags on the command line override it. Unknown flags, values out of
    bounds, the `problems()` of each group and those of `check(settings)` (which concern several groups, or files) are
    reported together. Flags without effect and the lines of `warn(settings)` (valid but surprising settings) are
    printed as warnings.

    Raises: SettingsError with every mistake, one per line.
    """
    groups = group_types(settings)
    parser = parser_of(settings, description=description)
    argv, warnings, mistakes = translate(sys.argv[1:] if argv is None else argv, parser.flags())
    parser.mistakes += mistakes
    config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.add_argument("--config", nargs="?")  # a missing value is reported by the main parser
    config = config_parser.parse_known_args(argv)[0].config
    yaml_flags = read_yaml_flags(Path(config), parser.flags()) if config else YamlFlags([], {}, [])
    parser.mistakes += yaml_flags.mistakes
    add_locations = partial(yaml_flags.with_locations, argv=argv)
    parser.add_locations, argv = add_locations, yaml_flags.arguments + argv

    *parsed, extra, unparsed = parser.parse_args_into_dataclasses(
        argv, return_remaining_strings=True, look_for_args_file=False
    )
    del extra  # the namespace with --config
    mistakes = parser.mistakes + [parser.unknown(word[2:].split("=")[0]) for word in unparsed if word.startswith("--")]
    if unparsed and not unparsed[0].startswith("--"):
        mistakes.append(f"{unparsed[0]}: does not belong to any flag")
    invalid = {field.name for group in parsed for field, _, _ in invalid_values(group)}
    mistakes += [line for group in parsed for line in out_of_bounds(group)]
    parsed = [with_defaults(group, invalid) for group in parsed]  # later checks need valid values
    result = settings(**dict(zip(groups, parsed, strict=True)))
    problems = [line for group in parsed for line in group.problems()] + (check(result) if check is not None else [])
    # Problems of flags with an invalid value are consequences of it, which is reported already.
    mistakes += [line for line in problems if invalid.isdisjoint(re.findall(r"--(\w+)", line))]
    raise_mistakes(add_locations(mistakes))
    if int(os.environ.get("RANK", 0)) == 0:
        for line in warnings + without_effect(parsed) + (warn(result) if warn else []):
            print(printable(redacted(f"warning: {line}")), file=sys.stderr)
    return result


def parser_of(settings: type, *, description: str) -> SuiteParser:
    """The parser of a step's flags, by group, and of --config."""
    program = "/".join(Path(sys.argv[0]).parts[-2:])  # step1_supervised_finetuning/main.py
    parser = SuiteParser(tuple(group_types(settings).values()), description=description, prog=program)
    parser.add_argument(
        "--config", metavar="FILE", default=None,
        help="YAML file of flags (without the dashes); flags on the command line override it",
    )  # fmt: skip
    return parser


def exit_with_help(settings: type, description: str) -> None:
    """Print the help of a program and exit if the command line asks for it; called before slow imports."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        if os.environ.get("RANK", "0") == "0":
            parser_of(settings, description=description).print_help()
        sys.exit(0)


def group_types(settings: type) -> dict[str, type]:
    """Name → dataclass of each argument group of a step's settings."""
    hints = get_type_hints(settings)
    return {field.name: hints[field.name] for field in dataclasses.fields(settings)}


def raise_mistakes(mistakes: Sequence[str]) -> None:
    """Raise one SettingsError (a ValueError) that lists all mistakes, if there are any."""
    if mistakes:
        count = f"{len(mistakes)} mistakes" if len(mistakes) > 1 else "1 mistake"
        raise SettingsError(
            f"{count} in the settings of this run:\n" + "\n".join(f"  - {mistake}" for mistake in mistakes)
        )


@contextmanager
def as_settings_errors() -> Iterator[None]:
    """Convert a ValueError inside, raised alike on every rank, to a SettingsError."""
    try:
        yield
    except SettingsError:
        raise
    except ValueError as mistake:
        raise SettingsError(str(mistake)) from mistake
