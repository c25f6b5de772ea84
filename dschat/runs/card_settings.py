"""The settings of a run that a model card shows: those that differ from their defaults, without local folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dschat.arguments import PROGRAM_SETTINGS, PPOArguments, RLHFSettings, flag_values
from dschat.arguments.flags import resume_policies
from dschat.arguments.secrets import redacted_values

FOLDERS = ("output_dir", "data_output_path", "tensorboard_path")  # where files were written


def changed_settings(program: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Flag → value of the flags that differ from their defaults, redacted, with `portable` paths.

    Args:
        program: its name in run.json.
        arguments: flag → value; flags that the program no longer has are kept.
    """
    defaults = _defaults(program, arguments)
    plain = flag_values(PROGRAM_SETTINGS[program]())
    values = flag_values(defaults) | {name: plain[name] for name in _chosen(arguments)}
    hidden = {*FOLDERS, *(name for name, policy in resume_policies(defaults).items() if policy == "ignore")}
    missing = object()
    changed = {
        name: value for name, value in arguments.items() if name not in hidden and values.get(name, missing) != value
    }
    return _portable_values(redacted_values(changed))


def _defaults(program: str, arguments: Mapping[str, Any]) -> Any:
    settings = PROGRAM_SETTINGS[program]
    return RLHFSettings(ppo=PPOArguments(**_chosen(arguments))) if settings is RLHFSettings else settings()


def _chosen(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of step 3 that other defaults depend on."""
    return {name: arguments[name] for name in ("algorithm", "policy_loss") if name in arguments}


def portable(text: str) -> str:
    """The text, with the last two parts of an absolute path: "/home/ann/data/a.jsonl:0.5" → "…/data/a.jsonl:0.5"."""
    return re.sub(r"(^|=)(?:~|/)[^=]*?([^/=]+/[^/=]+)/?(?=$|=)", r"\1…/\2", text)


def _portable_values(value: Any) -> Any:
    if isinstance(value, str):
        return portable(value)
    if isinstance(value, dict):
        return {name: _portable_values(entry) for name, entry in value.items()}
    return [_portable_values(entry) for entry in value] if isinstance(value, (list, tuple)) else value
