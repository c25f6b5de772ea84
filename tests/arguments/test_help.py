"""--help: answered before slow imports, every flag once, with a default that a person can read."""

import re
import subprocess
import sys

import pytest
from repository import ROOT

from dschat.arguments import RLHFSettings
from dschat.arguments.command_line import parser_of
from dschat.command import PROGRAMS
from dschat.completion import SETTINGS

SLOW = ("torch", "deepspeed", "datasets", "accelerate", "peft")


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", SETTINGS)
def test_help_of_a_step_imports_nothing_slow_and_shows_each_flag_once(name):
    completed = run("-X", "importtime", str(ROOT / PROGRAMS[name]), "--help")
    assert completed.returncode == 0
    lines = completed.stderr.splitlines()
    assert all(line.startswith("import time:") for line in lines), "a warning before the help"
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert "transformers" in imported and imported.isdisjoint(SLOW)
    listed = re.findall(r"^  (?:-h, )?(--\w[\w-]*)", completed.stdout, re.MULTILINE)
    flags = parser_of(SETTINGS[name], description="").flags()
    expected = {f"--{flag}" for flag in flags if "-" not in flag and not flag.startswith("no_")}
    assert len(listed) == len(set(listed)) and set(listed) == expected


def test_defaults_are_readable():
    text = " ".join(parser_of(RLHFSettings, description="").format_help().split())
    assert "--actor_learning_rate X Peak learning rate of the actor. (default: 1e-6)" in text
    assert "--remove_padding, --no_remove_padding" in text and "(default: on)" in text
    assert "--whiten_advantages {true,false}" in text
    assert not re.search(r"default: (None|\[|True|False|\w+\.0\))", text)
