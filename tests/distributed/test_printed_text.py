"""Text of models, data, services and users is printed with escapes for control characters, and without keys."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
from tiny_tokenizers import CHATML, make_tokenizer
from torch import distributed as dist

from dschat.arguments.command_line import SettingsError, parse
from dschat.data.datasets import DataOptions
from dschat.distributed import launch, watchdog
from dschat.distributed.failure import Failure
from dschat.rewards.retry import RetryPolicy
from dschat.runs.run_log import RunLog
from dschat.runs.set_up import load_splits

CODES = "\x1b]0;owned\x07\u202e"
ESCAPED = r"\x1b]0;owned\x07\u202e"
ADDRESS, REDACTED = "http://me:SECRET@host/?key=SECRET", "http://***@host/?key=***"


def assert_escaped(text: str) -> None:
    assert ESCAPED in text and not {"\x1b", "\x07", "\u202e"} & set(text)


def test_the_log_of_a_run_is_escaped(tmp_path, capsys):
    RunLog(str(tmp_path), name="ppo", arguments={}, total_steps=1).info(f"the model wrote {CODES}")
    assert_escaped(capsys.readouterr().out)


def test_an_exception_of_a_reward_function_is_escaped(capsys):
    def reward(part):
        raise ValueError(f"the answer was {CODES}")

    assert RetryPolicy(seconds=5, retries=0).scores(reward, 1, source="the reward") == [None]
    assert_escaped(capsys.readouterr().err)


def test_file_names_in_the_data_report_are_escaped(tmp_path, capsys):
    file = tmp_path / f"rows{CODES}.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n' * 3)
    options = DataOptions([str(file)], str(tmp_path / "arrow"), 64, eval_fraction=0.0)
    load_splits("sft", make_tokenizer(template=CHATML), options)
    assert_escaped(capsys.readouterr().out)


def test_settings_errors_are_escaped_and_redacted(capsys):
    def main():
        raise SettingsError(f"--data_path rows.jsonl:3: {CODES} is no prompt; {ADDRESS} is no file")

    with pytest.raises(SystemExit, match="2"):
        launch.run(main)
    printed = capsys.readouterr().err
    assert_escaped(printed)
    assert REDACTED in printed and "SECRET" not in printed


@dataclass
class Group:
    def problems(self) -> list[str]:
        return []


@dataclass
class Settings:
    group: Group


def test_warnings_about_settings_are_escaped_and_redacted(capsys):
    parse(Settings, [], description="", warn=lambda settings: [f"{ADDRESS} gives {CODES}"])
    printed = capsys.readouterr().err
    assert_escaped(printed)
    assert REDACTED in printed and "SECRET" not in printed


def test_the_failure_of_another_rank_is_escaped(capsys, monkeypatch):
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "READERS_TIMEOUT", 0.1)
    ended = threading.Event()
    ranks = [
        watchdog.Watchdog(seconds=60, store=store, rank=rank, world_size=2, end_process=lambda status: ended.set())
        for rank, store in enumerate([dist.HashStore()] * 2)
    ]
    Failure(f"rank 1 has failed: {CODES}", 1).publish(ranks[0].store)
    assert ended.wait(60)
    for rank in ranks:
        rank._stop.set()
    assert_escaped(capsys.readouterr().err)
