"""Parse the command line and an optional YAML file into dataclasses; report all mistakes in one message."""

import argparse
import copy
import dataclasses
import difflib
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import yaml
from transformers import HfArgumentParser

from dschat.arguments.secrets import redacted
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
        super().__init__(groups, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            self.mistakes.append(f"{action.option_strings[0]} {arg_string}: {error.message}")
            return action.default

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            choices = ", ".join(map(str, action.choices))
            self.mistakes.append(f"{action.option_strings[0]} {value}: choose one of {choices}")

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
        raise_together([*self.mistakes, message])

    def flags(self) -> dict[str, argparse.Action]:
        return {
            option[2:]: action for action in self._actions for option in action.option_strings if option[:2] == "--"
        }

    def unknown(self, flag: str) -> str:
        near = difflib.get_close_matches(flag, self.flags(), n=1)
        return f"--{flag} is no flag of this step" + (f": did you mean --{near[0]}?" if near else "; --help lists them")


def flag(default: Any, text: str, *, at_least: float | None = None, above: float | None = None,
         below: float | None = None, at_most: float | None = None, needs: Sequence[str] = (),
         choices: Iterable[str] = (), on_resume: Literal["apply", "refuse", "ignore"] = "apply") -> Any:  # fmt: skip
    """A dataclass field that is a flag, with its default, help text and bounds.

    Args:
        needs: flags ("name", or "name=value") of which at least one must be set for this flag to have an effect; if
            none is, a value other than the default causes a warning.
        choices: allowed values; empty: any value of the field's type.
        on_resume: effect of a value that differs from the checkpoint's on --resume. "refuse": an error, since models,
            data, random numbers or shapes would differ, see --resume_anyway; "ignore": none; "apply": the new value is
            used and logged.
    """
    bounds = {"at least": at_least, "above": above, "below": below, "at most": at_most}
    bounds = {word: bound for word, bound in bounds.items() if bound is not None}
    metadata = {"help": text, "bounds": bounds, "needs": tuple(needs), "choices": tuple(choices)}
    metadata["on_resume"] = on_resume
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
    """A line for each field of the group whose value violates the bounds of its flag()."""
    holds = {"at least": operator.ge, "above": operator.gt, "below": operator.lt, "at most": operator.le}
    mistakes = []
    for field in _flags_of(group):
        value, bounds = vars(group)[field.name], field.metadata["bounds"]
        if value is not None and not all(holds[word](value, bound) for word, bound in bounds.items()):
            rule = " and ".join(f"{word} {bound}" for word, bound in bounds.items())
            mistakes.append(f"--{field.name} {value}: must be {rule}")
    return mistakes


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
    argv = (_yaml_flags(Path(config), parser) if config else []) + argv

    *parsed, extra, rest = parser.parse_args_into_dataclasses(
        argv, return_remaining_strings=True, look_for_args_file=False
    )
    del extra  # the namespace that holds --config
    mistakes = parser.mistakes + [parser.unknown(word[2:].split("=")[0]) for word in rest if word.startswith("--")]
    if rest and not rest[0].startswith("--"):
        mistakes.append(f"{rest[0]}: belongs to no flag")
    for group in parsed:
        mistakes += out_of_bounds(group) + group.problems()
    result = settings(**dict(zip(groups, parsed, strict=True)))
    if check is not None:
        mistakes += check(result)
    raise_together(mistakes)
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


def _yaml_flags(path: Path, parser: SuiteParser) -> list[str]:
    if not path.is_file():
        parser.mistakes.append(f"--config {path}: there is no such file")
        return []
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        parser.mistakes.append(f"--config {path}: not readable as YAML ({error})")
        return []
    if not isinstance(settings, dict):
        parser.mistakes.append(f"--config {path}: wants lines of the form `flag: value`")
        return []
    words = []
    for flag, value in settings.items():
        if flag not in parser.flags():
            parser.mistakes.append(f"{path}: {parser.unknown(str(flag))}")
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            words += [f"--{flag}", *map(str, values)]
    return words
