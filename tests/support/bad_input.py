"""Tables of bad input that several tests share, and the mistakes that a program reports for a command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dschat import arguments
from dschat.arguments.command_line import SettingsError, parse

STEPS = {
    "sft": (arguments.SFTSettings, ["--model_name_or_path", "hub/name", "--data_path", "rows.jsonl"]),
    "reward": (arguments.RewardModelSettings, ["--model_name_or_path", "hub/name", "--data_path", "rows.jsonl"]),
    "dpo": (arguments.PreferenceSettings, ["--model_name_or_path", "hub/name", "--data_path", "rows.jsonl"]),
    "ppo": (arguments.RLHFSettings, ["--actor_model_name_or_path", "hub/name", "--data_path", "rows.jsonl"]),
    "pairs": (arguments.PairSettings, ["--model_name_or_path", "hub/name", "--data_path", "rows.jsonl"]),
}


def mistakes(step: str, *argv: str, check: Callable[[Any], list[str]] | None = None) -> list[str]:
    """The lines of the SettingsError; [] if the settings are accepted. `check` is the one of the step's main."""
    settings, needed = STEPS[step]
    try:
        parse(settings, [*needed, *argv], description="", check=check)
    except SettingsError as error:
        return str(error).split("\n")[1:]
    return []


NESTING_DEPTH = 10_000
INVALID_JSON = {  # content that every reader refuses → part of the message
    b"": "it is empty",
    b" \n": "it is empty",
    b"{": "not valid JSON",
    b"{'a': 1}": "not valid JSON",
    b'{"a": 1,}': "not valid JSON",
    b'{"a": 1} {"b": 2}': "not valid JSON",
    b"\x00": "not valid JSON",
    b'{"a": tru}': "not valid JSON",
    b"[" * NESTING_DEPTH: "nested deeper than 100",
    b"[" * NESTING_DEPTH + b"]" * NESTING_DEPTH: "nested deeper than 100",
    b'{"a":' * NESTING_DEPTH + b"1" + b"}" * NESTING_DEPTH: "nested deeper than 100",
    b"[" * 500 + b"]" * 500: "nested deeper than 100",
    b'{"a":' * 102 + b"1" + b"}" * 102: "nested deeper than 100",
    b'{"a": ' + b"9" * 5000 + b"}": "5000 digits is beyond float64",
    b'{"a": -' + b"9" * 400 + b"}": "400 digits is beyond float64",
    b'{"a": "gr\xfcn"}': "invalid UTF-8 at line 1, byte 10",
    b'{\n"a": "\xff"}': "invalid UTF-8 at line 2, byte 7",
    '{"a": 1}'.encode("utf-16"): "invalid UTF-8",
    b'{"a": "\\ud800"}': "lone",
    b'{"\\udfff": 1}': "lone",
    b'{"a": [["\\ud83d x"]]}': "lone",
}  # fmt: skip
INVALID_SETTINGS_JSON = {  # content that only readers of settings refuse → part of the message
    b'{"a": NaN}': "NaN is not a JSON number",
    b'{"a": -Infinity}': "-Infinity is not a JSON number",
    b'{"a": 1e400}': "1e400 is beyond float64",
    b'{"a": 1, "a": 2}': "'a' occurs twice",
    b'{"b": {"a": 1, "a": 2}}': "'a' occurs twice",
}


def one_line(error: pytest.ExceptionInfo) -> str:
    """The message of the exception, after a check that it is one short line."""
    text = str(error.value)
    assert "\n" not in text and len(text) < 400, text
    return text
