"""Warnings about reward sources hold neither keys nor control characters."""

from dataclasses import replace

from test_rewards import actor_tokenizer, answers_of, rewards_of, rollout_of


def test_a_source_without_an_opinion_is_named_without_its_key(tmp_path, capsys):
    file = tmp_path / "rewards.py"
    file.write_text("def silent(responses, token=''):\n    return [None] * len(responses)\n")
    answers = answers_of()
    answers = replace(answers, rows=[{"\x1b[2J": 1}] * len(answers.rows))
    rewards_of(f"{file}:silent?token=SECRET").score(rollout_of(actor_tokenizer()), answers)
    said = capsys.readouterr().err
    assert f"the reward {file}:silent?token=*** has no opinion" in said and "SECRET" not in said
    assert r"A row has: \x1b[2J" in said and "\x1b" not in said
