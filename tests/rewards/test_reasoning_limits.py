"""Answers whose scoring would not end lose their own score only."""

import pytest

pytest.importorskip("reasoning_gym")

from dschat.data.sources.reasoning_gym import row_of, task_of  # noqa: E402
from dschat.rewards import reasoning_gym as reasoning  # noqa: E402
from dschat.rewards.rules import RULES  # noqa: E402
from dschat.rewards.worker_process import TimeLimits  # noqa: E402

BOMBS = ["9**9**9**9", "factorial(factorial(factorial(9)))", "(" * 2000 + "x" + ")" * 2000, "Abs(9**9**9)"]


@pytest.mark.parametrize("task", ["countdown", "polynomial_multiplication"])
def test_answers_that_exceed_the_limits_score_0_and_the_others_keep_their_scores(task, monkeypatch, capsys):
    monkeypatch.setattr(reasoning.scorers, "limits", TimeLimits(seconds=1.0, budget=2.0, short_seconds=0.2))
    name = f"reasoning_gym:{task}?size=2"
    row = row_of(name, task_of(name)[0])
    responses = [f"<answer>{text}</answer>" for bomb in BOMBS for text in (bomb, row["answer"])]
    rows = [row | {"answer": None}] * len(responses)
    scores = RULES["reasoning_gym"]([""] * len(responses), responses, rows)
    assert scores == [0.0, 1.0] * len(BOMBS)
    assert "too much memory to be scored with reasoning-gym: they count as wrong" in capsys.readouterr().err
