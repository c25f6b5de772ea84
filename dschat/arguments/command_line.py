"""Parse the command line and an optional YAML file into dataclasses; report all mistakes in one message."""

import argparse
import copy
import dataclasses
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from transformers import HfArgumentParser

from dschat.arguments.secrets import redacted
from dschat.arguments.text_rules import broken_text_rule
from dschat.arguments.yaml_config import YamlFlags, read_yaml_flags, shown, unknown_flag
from dschat.distributed.terminal import printable

Settings = TypeVar("Settings")
LARGEST_FLOAT, LARGEST_INTEGER = 1e15, 2**31 - 1  # where a flag has no bound of its own
SMALLEST_FLOAT32 = 1.1754943508222875e-38


class SettingsError(ValueError):
    """Invalid settings; the message lists every mistake with its remedy, secrets redacted."""

    def __init__(self, message: str) -> None:
        super().__init__(redacted(message))


class SuiteParser(HfArgumentParser):
    """HfArgumentParser that collects all mistakes instead of exiting at the first one."""

    def __init__(self, groups: Sequence[type], **kwargs: Any):
        self.mistakes: list[str] = []
        self.locate: Callable[[Sequence[str]], Sequence[str]] = list  # adds where a flag was set
        super().__init__(groups, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            reason = error.message if len(arg_string) <= 200 and arg_string.isprintable() else "cannot be read"
            self.mistakes.append(f"{action.option_strings[0]} {shown(arg_string)}: {reason}")
            return action.default

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            choices = ", ".join(map(str, action.choices))
            self.mistakes.append(f"{action.option_strings[0]} {shown(value)}: choose one of {choices}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        values = super()._get_values(action, arg_strings)
        # An invalid choice has been reported; the code that follows needs a valid one.
        return action.default if action.choices and values not in action.choices else values

    @staticmethod
    def _parse_dataclass_field(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
        plain = copy.copy(field)  # argparse must not get the bounds that flag() put into the metadata
        plain.metadata = {"help": field.metadata["help"]}
        if field.metadata["choices"]:
            plain.metadata["choices"] = list(field.metadata["choices"])
        HfArgumentParser._parse_dataclass_field(parser, plain)

    def error(self, message: str) -> None:
        raise_together(self.locate([*self.mistakes, message]))

    def flags(self) -> dict[str, argparse.Action]:
        return {
            option[2:]: action for action in self._actions for option in action.option_strings if option[:2] == "--"
        }

    def unknown(self, flag: str) -> str:
        return unknown_flag(flag, self.flags())


def flag(default: Any, text: str, *, at_least: float | None = None, above: float | None = None,
         below: float | None = None, at_most: float | None = None, needs: Sequence[str] = (),
         choices: Iterable[str] = (), on_resume: Literal["apply", "refuse", "ignore"] = "apply",
         finite: bool = True) -> Any:  # fmt: skip
    """A dataclass field that is a flag, with its default, help text and bounds.

    Args:
        needs: flags ("name", or "name=value") of which at least one must be set for this flag to have an effect; if
            none is, a value other than the default causes a warning.
        choices: allowed values; empty: any value of the field's type.
        finite: False: inf is allowed too, whatever at_most says, and means no limit; NaN never is.
        on_resume: effect of a value that differs from the checkpoint's on --resume. "refuse": an error, since models,
            data, random numbers or shapes would differ, see --resume_anyway; "ignore": none; "apply": the new value is
            used and logged.
    """
    bounds = {"at least": at_least, "above": above, "below": below, "at most": at_most}
    bounds = {word: bound for word, bound in bounds.items() if bound is not None}
    metadata = {"help": text, "bounds": bounds, "needs": tuple(needs), "choices": tuple(choices)}
    metadata |= {"on_resume": on_resume, "finite": finite}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def subset(group: type, name: str, *, keep: Sequence[str]) -> type:
    """A subclass of a group in which only the fields `keep` are flags; the others have their defaults."""
    dropped = []
    for field in dataclasses.fields(group):
        if field.name not in keep:
            field = copy.copy(field)
            field.init = False  # the parser skips such fields
            dropped.append((field.name, field.type, field))
    owner = {"_argument_group_name": group._argument_group_name, "__module__": group.__module__}
    return dataclasses.make_dataclass(name, dropped, bases=(group,), namespace=owner)


def out_of_bounds(group: Any) -> list[str]:
    """A line for each value of the group that breaks the bounds of its flag(), fits no tensor or can be no path."""
    return [f"--{field.name} {shown(value)}: {rule}" for field, value, rule in _broken_values(group)]


def _broken_values(group: Any) -> Iterator[tuple[dataclasses.Field, Any, str]]:
    for field in _flags_of(group):
        given = vars(group)[field.name]
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, str):
                rule = "" if value == field.default else broken_text_rule(value)
            else:
                rule = _broken_rule(value, field.metadata["bounds"], finite=field.metadata["finite"])
                rule = f"must be {rule}" if rule else ""
            if rule:
                yield field, value, rule


def _with_defaults(group: Any, names: Container[str]) -> Any:
    """The group, with the defaults of these flags in place of the values given."""
    fields = _flags_of(group)
    if not any(field.name in names for field in fields):
        return group
    return type(group)(**{field.name: vars(group)[field.name] for field in fields if field.name not in names})


def _broken_rule(number: Any, bounds: dict[str, float], *, finite: bool) -> str:
    """The rule that the number breaks, or ""; floats end up in float32 tensors, integers are multiplied in int64."""
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return ""
    if not finite and number == math.inf:
        return ""
    holds = {"at least": operator.ge, "above": operator.gt, "below": operator.lt, "at most": operator.le}
    if not all(holds[word](number, bound) for word, bound in bounds.items()):
        return " and ".join(f"{word} {bound}" for word, bound in bounds.items())
    largest = bounds.get("at most", LARGEST_FLOAT if isinstance(number, float) else LARGEST_INTEGER)
    if not abs(number) <= largest:
        return f"a finite number of at most {largest:g}" + ("" if finite else ", or inf")
    if 0 < abs(number) < SMALLEST_FLOAT32:
        return f"0 or at least {SMALLEST_FLOAT32:.2g}: it is 0 in float32"
    return ""


def without_effect(groups: Sequence[Any]) -> list[str]:
    """A line for each flag that is not at its default while none of the flags that it needs is set."""
    values = {name: value for group in groups for name, value in vars(group).items()}
    lines = []
    for field in (field for group in groups for field in _flags_of(group)):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        needed = [need.partition("=") for need in field.metadata["needs"] if need.partition("=")[0] in values]
        met = any(str(values[name]) == value if value else values[name] for name, _, value in needed)
        if needed and values[field.name] != default and not met:
            ways = " or ".join(f"--{name} {value}".rstrip() for name, _, value in needed)
            lines.append(f"--{field.name} {values[field.name]} has no effect without {ways}")
    return lines


def _flags_of(group: Any) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(group) if field.init]  # see subset


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
    argv = list(sys.argv[1:] if argv is None else argv)
    groups = group_types(settings)
    parser = SuiteParser(tuple(groups.values()), description=description)
    parser.add_argument("--config", default=None, help="YAML file of flags (without the dashes); flags given here win")
    path = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    path.add_argument("--config", nargs="?")  # a missing value is reported by the main parser
    config = path.parse_known_args(argv)[0].config
    file = read_yaml_flags(Path(config), parser.flags()) if config else YamlFlags([], {}, [])
    parser.mistakes += file.mistakes
    locate = partial(file.located, argv=argv)
    parser.locate, argv = locate, file.words + argv

    *parsed, extra, rest = parser.parse_args_into_dataclasses(
        argv, return_remaining_strings=True, look_for_args_file=False
    )
    del extra  # the namespace that holds --config
    mistakes = parser.mistakes + [parser.unknown(word[2:].split("=")[0]) for word in rest if word.startswith("--")]
    if rest and not rest[0].startswith("--"):
        mistakes.append(f"{rest[0]}: belongs to no flag")
    broken = {field.name for group in parsed for field, _, _ in _broken_values(group)}
    mistakes += [line for group in parsed for line in out_of_bounds(group)]
    parsed = [_with_defaults(group, broken) for group in parsed]  # what follows must not fail of invalid values
    result = settings(**dict(zip(groups, parsed, strict=True)))
    further = [line for group in parsed for line in group.problems()] + (check(result) if check is not None else [])
    mistakes += [line for line in further if broken.isdisjoint(re.findall(r"--(\w+)", line))]  # others are reported
    raise_together(locate(mistakes))
    if int(os.environ.get("RANK", 0)) == 0:
        for line in without_effect(parsed) + (warn(result) if warn else []):
            print(printable(redacted(f"warning: {line}")), file=sys.stderr)
    return result


def group_types(settings: type) -> dict[str, type]:
    """Name → dataclass of each argument group of a step's settings."""
    hints = get_type_hints(settings)
    return {field.name: hints[field.name] for field in dataclasses.fields(settings)}


def on_resume(settings: Any) -> dict[str, str]:
    """Flag → the on_resume value of its flag()."""
    groups = vars(settings).values()
    return {field.name: field.metadata["on_resume"] for group in groups for field in _flags_of(group)}


def raise_together(mistakes: Sequence[str]) -> None:
    """Raise one SettingsError (a ValueError) that lists all mistakes, if there are any."""
    if mistakes:
        count = f"{len(mistakes)} mistakes" if len(mistakes) > 1 else "1 mistake"
        raise SettingsError(
            f"{count} in the settings of this run:\n" + "\n".join(f"  - {mistake}" for mistake in mistakes)
        )


@contextmanager
def settings_of_user() -> Iterator[None]:
    """Convert a ValueError inside, raised alike on every rank, to a SettingsError."""
    try:
        yield
    except SettingsError:
        raise
    except ValueError as mistake:
        raise SettingsError(str(mistake)) from mistake
