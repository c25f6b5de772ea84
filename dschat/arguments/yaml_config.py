"""The YAML file of --config: a flat mapping of flags, each set once, to values as on a command line."""

from __future__ import annotations

import datetime
import difflib
import re
from argparse import Action
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dschat.arguments.other_suites import ours_for

_LARGEST = 1 << 20  # bytes; a file of flags has a few hundred


class YamlFlags(NamedTuple):
    """The flags that a file sets."""

    arguments: list[str]  # the equivalent command line
    locations: dict[str, str]  # flag → "file:line"
    mistakes: list[str]  # one line each

    def with_locations(self, mistakes: Sequence[str], argv: Sequence[str]) -> list[str]:
        """The mistakes; file and line are added to those about flags that are set in the file and not in argv."""
        on_command_line = {word[2:].partition("=")[0] for word in argv if word.startswith("--")}
        locations = {flag: location for flag, location in self.locations.items() if flag not in on_command_line}
        matches = [re.match(r"(?:argument )?--(\w+)", mistake) for mistake in mistakes]
        return [
            f"{mistake} (set in {locations[match[1]]})" if match and match[1] in locations else mistake
            for mistake, match in zip(mistakes, matches, strict=True)
        ]


def read_yaml_flags(path: Path, flags: Mapping[str, Action]) -> YamlFlags:
    """Read a --config file.

    Args:
        flags: name → action of every flag that may be set.
    """
    try:
        loader, root = _root(path)
        if root is None:
            return YamlFlags([], {}, [])
        if not isinstance(root, yaml.MappingNode):
            raise ValueError(f"--config {path}: must contain lines of the form `flag: value`")
        mistakes = _repeated_flags(root, path)
        _merge_anchors(loader, root, path)
    except ValueError as error:
        return YamlFlags([], {}, [str(error)])
    arguments, locations = [], {}
    for key, value in root.value:
        location = f"{path}:{key.start_mark.line + 1}"
        try:
            arguments += _flag_arguments(_flag_name(key), loader, value, flags)
            locations[key.value] = location
        except ValueError as error:
            mistakes.append(f"--config {location}: {error}")
    return YamlFlags(arguments, locations, mistakes)


def unknown_flag(name: str, flags: Mapping[str, Action]) -> str:
    """The message for an unknown flag, with the closest existing one."""
    near = ours_for(name, flags) or next(iter(difflib.get_close_matches(name[:100], flags, n=1)), None)
    hint = f": did you mean --{near}?" if near else "; --help lists them"
    return f"--{format_value(name)} is not a flag of this step{hint}"


def format_value(value: Any) -> str:
    """A value for a message: on one line, shortened to about 100 characters if it is longer than 200."""
    text = str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 200 else f"{text[:100]}… ({len(text)} characters)"


def _root(path: Path) -> tuple[yaml.SafeLoader, yaml.Node | None]:
    if path.is_dir():
        raise ValueError(f"--config {path}: is a folder; name a YAML file")
    if not path.is_file():
        raise ValueError(f"--config {path}: there is no such file")
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"--config {path}: has more than {_LARGEST >> 20} MiB: name a YAML file of flags")
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8-sig"))
        return loader, loader.get_single_node()
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {path}: not readable as YAML (byte {error.start + 1} is not UTF-8)") from error
    except yaml.YAMLError as error:
        raise ValueError(_yaml_mistake(path, error)) from error
    except RecursionError as error:
        raise ValueError(f"--config {path}: not readable as YAML (nested too deep)") from error


def _yaml_mistake(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    return f"--config {path}{f':{mark.line + 1}' if mark else ''}: not readable as YAML ({reason})"


def _repeated_flags(root: yaml.MappingNode, path: Path) -> list[str]:
    first_lines: dict[str, int] = {}
    mistakes = []
    for key, _ in root.value:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode) and first_lines.setdefault(key.value, line) != line:
            mistakes.append(f"--config {path}:{line}: --{format_value(key.value)} is set a second time (first in line "
                            f"{first_lines[key.value]}): keep one")  # fmt: skip
    return mistakes


def _merge_anchors(loader: yaml.SafeLoader, root: yaml.MappingNode, path: Path) -> None:
    try:
        loader.flatten_mapping(root)  # `<<: *anchor`
    except yaml.YAMLError as error:
        raise ValueError(_yaml_mistake(path, error)) from error


def _flag_name(key: yaml.Node) -> str:
    if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
        text = key.value if isinstance(key, yaml.ScalarNode) else key.id
        raise ValueError(f"{format_value(text)} is not a flag name: write lines of the form `flag: value`")
    return key.value


def _flag_arguments(name: str, loader: yaml.SafeLoader, node: yaml.Node, flags: Mapping[str, Action]) -> list[str]:
    """`--name value …`; [] if the value is empty."""
    action = flags.get(name)
    if name == "config":
        raise ValueError("--config: a file of flags cannot include another; merge both into one")
    if action is None or name == "help":
        raise ValueError(unknown_flag(name, {flag: a for flag, a in flags.items() if flag not in ("help", "config")}))
    if action.nargs == 0:
        raise ValueError(f"--{name}: takes no value; write `{action.dest}: false`")
    if isinstance(node, yaml.MappingNode):
        raise ValueError(f"--{name}: must be a plain value, not a mapping")
    if not isinstance(node, yaml.SequenceNode):
        text = _argument_text(name, loader, node, action)
        return [] if text is None else [f"--{name}={text}"]
    if action.nargs not in ("+", "*"):
        raise ValueError(f"--{name}: must be one value, not a list")
    if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
        raise ValueError(f"--{name}: must be a list of plain values, without nested lists or mappings")
    texts = [_argument_text(name, loader, item, action) for item in node.value]
    if any(text is None or text.startswith("--") for text in texts):
        raise ValueError(f"--{name}: an item of the list is empty, or begins like a flag")
    return [f"--{name}", *map(str, texts)] if texts else []


def _argument_text(name: str, loader: yaml.SafeLoader, node: yaml.Node, action: Action) -> str | None:
    try:
        value = loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, AttributeError) as error:
        reason = getattr(error, "problem", None) or str(error)
        raise ValueError(f"--{name} {format_value(node.value)}: cannot be read ({format_value(reason)})") from error
    if isinstance(value, (datetime.date, bytes)):
        kind = "a date" if isinstance(value, datetime.date) else "binary data"
        raise ValueError(f"--{name} {format_value(node.value)}: is {kind} in YAML; quote text")
    if isinstance(value, bool) and action.type is str:
        raise ValueError(f"--{name} {node.value}: is true or false in YAML; quote text")
    if isinstance(value, str) and "\0" in value:
        raise ValueError(f"--{name} {format_value(value)}: contains a NUL character")
    return None if value is None else str(value)
