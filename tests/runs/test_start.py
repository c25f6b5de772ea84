"""Checks and locks at the start of a run."""

import fcntl
from pathlib import Path

import pytest
from test_validation import materials, mistakes  # noqa: F401  (a fixture)

from dschat.arguments import DeviceArguments, RunArguments
from dschat.runs import output_folder, set_up

RANKS = Path(__file__).with_name("start_ranks.py")


def test_nodes_that_do_not_share_the_output_folder_are_named_at_the_start(programs, tmp_path):
    printed = programs.run(RANKS, [tmp_path], processes=2, log=tmp_path / "log", code=2)
    assert printed.count("files that rank 0 writes there are not visible on") == 1 and "Traceback" not in printed


def test_a_start_makes_the_folder_and_locks_it(monkeypatch, tmp_path):
    monkeypatch.setattr(set_up.launch, "join", lambda **_: None)
    monkeypatch.setattr(output_folder, "_locks", {})
    set_up.start(RunArguments(output_dir=str(tmp_path / "run")), DeviceArguments())
    with (tmp_path / "run" / ".lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_judge_that_cannot_be_loaded_is_a_settings_error(materials, tmp_path):  # noqa: F811
    (tmp_path / "judge.py").write_text("def judge(prompts, responses, rows): return []")
    assert mistakes("ppo", materials, tmp_path / "run", judge=f"{tmp_path / 'judge.py'}:judge") == []
    (line,) = mistakes("ppo", materials, tmp_path / "run", judge=f"{tmp_path / 'judge.py'}:juge")
    assert line.startswith("--judge ") and "has no function juge" in line
