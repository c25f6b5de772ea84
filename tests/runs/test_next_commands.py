"""The commands at the end of a run name existing programs and flags, and the exported folder."""

import re

import pytest

from dschat.arguments.command_line import parser_of
from dschat.command import PROGRAMS
from dschat.completion import SETTINGS
from dschat.runs.next_commands import NEXT_COMMANDS, next_commands


@pytest.mark.parametrize("step", NEXT_COMMANDS)
def test_programs_and_flags_exist(step):
    for _, command in NEXT_COMMANDS[step]:
        names = re.findall(r"dschat (?:path )?(\w+)", command)
        assert names and set(names) <= set(PROGRAMS), command
        flags = re.findall(r"--(\w+)", command)
        assert not flags or set(flags) <= set(parser_of(SETTINGS[names[0]], description="").flags()), command


def test_the_commands_use_the_exported_folder(tmp_path):
    output = tmp_path / "a run"
    (output / "critic").mkdir(parents=True)
    for folder in (output, output / "critic"):
        (folder / "config.json").write_text("{}")
    lines = next_commands("rlhf", output, ["", "critic", "actor_ema"])
    assert lines[0] == f"exported: {output}, {output / 'critic'}"
    assert f"    dschat chat '{output}'" in lines or any(line.endswith(f" -m dschat chat '{output}'") for line in lines)


def test_without_the_command_on_the_path_the_interpreter_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert any("python" in line and " -m dschat report " in line for line in next_commands("sft", tmp_path, [""]))
