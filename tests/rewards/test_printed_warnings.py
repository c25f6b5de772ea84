"""Warnings about reward sources hold neither keys nor control characters."""

from dataclasses import replace

from test_rewards import actor_tokenizer, answers_of, rewards_of, rollout_of


def test_a_source_that_returns_no_scores_is_named_without_its_key(tmp_path, capsys):
    file = tmp_path / "rewards.py"
    file.write_text("def silent(responses, token=''):\n    return [None] * len(responses)\n")
    answers = answers_of()
    answers = replace(answers, rows=[{"\x1b[2J": 1}] * len(answers.rows))
    rewards_of(f"{file}:silent?token=SECRET").score(rollout_of(actor_tokenizer()), answers)
    printed = capsys.readouterr().err
    assert f"the reward {file}:silent?token=*** returned no score for any of" in printed and "SECRET" not in printed
    assert r"Columns of a row: \x1b[2J" in printed and "\x1b" not in printed
