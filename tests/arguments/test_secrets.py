"""API keys and URL passwords reach no file or message, and a changed key does not change the run's identity."""

import json
from dataclasses import asdict

import pytest

from dschat.arguments import RewardArguments, RLHFSettings
from dschat.arguments.command_line import SettingsError, raise_mistakes
from dschat.arguments.secrets import redacted, redacted_values
from dschat.checkpoints.loading import changed_arguments
from dschat.rewards.specification import parse_reward
from dschat.runs.run_log import RunLog


@pytest.mark.parametrize(
    "address, expected",
    [
        ("https://me:pw@host/score", "https://***@host/score"),
        ("https://token@host:80/score@0.5", "https://***@host:80/score@0.5"),
        ("http://u:p@ss@host/x", "http://***@host/x"),
        ("http://u:p/w@host/x", "http://***@host/x"),
        ("http://h/score?api_key=k&model=7b@0.5", "http://h/score?api_key=***&model=7b@0.5"),
        ("http://h/score?model=7b&token=a@b@-2e-1", "http://h/score?model=7b&token=***@-2e-1"),
        ("http://h/?X-Amz-Signature=1;KEY=2#access_token=3", "http://h/?X-Amz-Signature=***;KEY=***#access_token=***"),
        ("http://h/?to%6ben=s", "http://h/?to%6ben=***"),
        ("http://h/?k=hf_abcdefghijklmnopqrstuvwxyzABCDEF", "http://h/?k=***"),
        ("http://h/?k=9f86d081884c7d65", "http://h/?k=***"),
        ("HTTPS://h/?password=s", "HTTPS://h/?password=***"),
        ("http://h/?apiKey=s&APIKEY=s&authToken=s", "http://h/?apiKey=***&APIKEY=***&authToken=***"),
        ("judge.py:judge?api_key=s&bonus=2@0.5", "judge.py:judge?api_key=***&bonus=2@0.5"),
        ("warning: the reward http://h/?key=s gave 'x'", "warning: the reward http://h/?key=*** gave 'x'"),
    ],
)
def test_secrets_in_addresses_are_redacted(address, expected):
    assert redacted(address) == expected and redacted(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8000/score", "http://h:80/score@0.5", "https://h/score?model=Qwen2.5-7B-Instruct&max=20@2",
        "http://h/score?max_tokens=512&tokenizer=gpt2&signal=1&passes=3",
        "http://h/v1/Skywork-Reward-V2-Llama-3.1-8B", "judge.py:judge?bonus=2@2", "owner/model", "me@host.org",
    ],
)  # fmt: skip
def test_text_without_secrets_is_unchanged(text):
    assert redacted(text) == text


@pytest.fixture
def rewards() -> RewardArguments:
    return RewardArguments(reward=["http://host/score?api_key=SECRET@0.5", "length"])


def test_run_json_and_the_console_contain_no_key(rewards, tmp_path, capsys):
    log = RunLog(str(tmp_path), name="ppo", arguments=asdict(rewards), total_steps=1)
    log.info("asking http://host/score?api_key=SECRET")
    assert json.loads((tmp_path / "run.json").read_text())["arguments"]["reward"] == [
        "http://host/score?api_key=***@0.5", "length",
    ]  # fmt: skip
    assert log.metadata["arguments"]["reward"][0] == "http://host/score?api_key=***@0.5", "for manifests"
    assert "SECRET" not in capsys.readouterr().out
    assert rewards.reward[0] == "http://host/score?api_key=SECRET@0.5", "the run itself needs the key"


def test_a_run_can_be_resumed_with_a_new_key_but_not_with_another_address(rewards, tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"arguments": redacted_values(asdict(rewards))}))
    rewards.reward[0] = "http://host/score?api_key=ROTATED@0.5"
    assert changed_arguments(tmp_path, RLHFSettings(rewards=rewards), resume_anyway=False) == []
    rewards.reward[0] = "http://elsewhere/score?api_key=ROTATED@0.5"
    with pytest.raises(ValueError, match=r"--reward was .*host/score\?api_key=\*\*\*") as caught:
        changed_arguments(tmp_path, RLHFSettings(rewards=rewards), resume_anyway=False)
    assert "ROTATED" not in str(caught.value)


def test_a_manifest_of_an_earlier_version_that_contains_the_key_can_be_resumed(rewards, tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"arguments": {"reward": rewards.reward}}))
    assert changed_arguments(tmp_path, RLHFSettings(rewards=rewards), resume_anyway=False) == []


def test_mistakes_in_an_address_do_not_print_its_secrets():
    with pytest.raises(SettingsError) as caught:
        raise_mistakes(["--reward http://me:SECRET@host/score: may hold no password", "http://h/?key=SECRET: no flag"])
    assert "SECRET" not in str(caught.value) and "http://***@host/score" in str(caught.value)
    assert parse_reward("http://host/score?api_key=SECRET@2").url == "http://host/score?api_key=SECRET"
