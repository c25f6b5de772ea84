"""Declares flags as fields of argument groups, with bounds, dependencies, and the effect of a change on --resume."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Literal

from dschat.arguments.bounds import Bounds
from dschat.arguments.text_rules import text_problem
from dschat.arguments.yaml_config import format_value

ResumePolicy = Literal["apply", "refuse", "ignore"]


def flag(
    default: Any, text: str, *, on_resume: ResumePolicy, needs: Sequence[str] = (), choices: Iterable[str] = (),
    **bounds: Any,
) -> Any:  # fmt: skip
    """A dataclass field that is a flag, with its default, help text and bounds.

    Args:
        on_resume: effect of a value that differs from the checkpoint's on --resume. "refuse": an error, since the flag
            identifies the run (models, data, random numbers or shapes would differ), see --resume_anyway; "apply": the
            new value is used and logged; "ignore": none.
        needs: flags ("name", or "name=value") of which at least one must be set for this flag to have an effect; if
            none is, a value other than the default causes a warning.
        choices: allowed values; empty: any value of the field's type.
        bounds: fields of Bounds.
    """
    metadata = {"help": text, "bounds": Bounds(**bounds), "needs": tuple(needs), "choices": tuple(choices)}
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
    """A line for each invalid value of the group: out of the bounds of its flag(), or no valid text or path."""
    return [f"--{field.name} {format_value(value)}: {rule}" for field, value, rule in invalid_values(group)]


def invalid_values(group: Any) -> Iterator[tuple[dataclasses.Field, Any, str]]:
    """Field, value and broken rule of each invalid value of the group."""
    for field in _flags_of(group):
        values = vars(group)[field.name]
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, str):
                rule = "" if value == field.default else text_problem(value)
            else:
                rule = field.metadata["bounds"].violation(value)
                rule = f"must be {rule}" if rule else ""
            if rule:
                yield field, value, rule


def with_defaults(group: Any, names: Container[str]) -> Any:
    """The group, with the defaults of these flags in place of their values."""
    fields = _flags_of(group)
    if not any(field.name in names for field in fields):
        return group
    return type(group)(**{field.name: vars(group)[field.name] for field in fields if field.name not in names})


def without_effect(groups: Sequence[Any]) -> list[str]:
    """A line for each flag that is not at its default while none of the flags that it needs is set."""
    values = {name: value for group in groups for name, value in vars(group).items()}
    lines = []
    for field in (field for group in groups for field in _flags_of(group)):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        alternatives = [need.partition("=") for need in field.metadata["needs"] if need.partition("=")[0] in values]
        satisfied = any(_has(values[name], value) if value else values[name] for name, _, value in alternatives)
        if alternatives and values[field.name] != default and not satisfied:
            ways = " or ".join(f"--{name} {value}".rstrip() for name, _, value in alternatives)
            lines.append(f"--{field.name} {values[field.name]} has no effect without {ways}")
    return lines


def _has(value: Any, choice: str) -> bool:
    """Whether a flag has this value, or contains it."""
    return choice in value if isinstance(value, list) else str(value) == choice


def resume_policies(settings: Any) -> dict[str, ResumePolicy]:
    """Flag → the on_resume value of its flag(), over all groups of a program's settings."""
    groups = vars(settings).values()
    return {field.name: field.metadata["on_resume"] for group in groups for field in _flags_of(group)}


def _flags_of(group: Any) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(group) if field.init]  # see subset
