"""scripts/chain_sum: correct worked sums, unseen evaluation questions, and removal of the system prompt block."""

import json
import subprocess
import sys

import pytest
from repository import SCRIPTS

pytest.importorskip("reasoning_gym", reason="the extra reasoning is not installed")
sys.path[:0] = [str(SCRIPTS / "chain_sum"), str(SCRIPTS / "smollm2")]

from evaluate import seen_prompts, unseen_sums  # noqa: E402
from prepare_model import without_system_prompt  # noqa: E402
from worked_sums import worked_solution  # noqa: E402


def test_worked_sums_have_one_step_per_line():
    assert worked_solution("4 - 1") == "4 - 1 = 3"
    assert worked_solution("4 - 9 + 12 - 0") == "4 - 9 = -5\n-5 + 12 = 7\n7 - 0 = 7"


def test_prompts_are_those_of_reasoning_gym_and_every_step_is_correct(tmp_path):
    program = [sys.executable, str(SCRIPTS / "chain_sum" / "worked_sums.py"), "--output", str(tmp_path)]
    subprocess.run([*program, "--rows", "200", "--max_terms", "4", "--max_digits", "2"], check=True)
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").open()]
    assert len(rows) == 200
    for row in rows:
        question = row["prompt"].partition(": ")[2].removesuffix(" =")
        lines = row["response"].split("\n")
        assert len(lines) == len(question.split()) // 2
        assert all(eval(left) == int(right) for left, right in (line.split(" = ") for line in lines))
        assert eval(question) == int(lines[-1].split(" = ")[1])


def test_the_evaluation_has_only_sums_that_were_not_trained_on(tmp_path):
    first = [entry["question"] for entry in unseen_sums(4, 30, set())]
    assert len(set(first)) == 30
    (tmp_path / "data").mkdir()
    (tmp_path / "level1").mkdir()
    (tmp_path / "data" / "sft.jsonl").write_text(json.dumps({"prompt": first[0], "response": ""}) + "\n")
    shown = [{"phase": "train", "prompt": first[1]}, {"phase": "eval", "prompt": first[2]}]
    (tmp_path / "level1" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    seen = seen_prompts(tmp_path)
    assert seen == set(first[:2])
    again = [entry["question"] for entry in unseen_sums(4, 28, seen)]
    assert again == first[2:]


def test_only_the_default_system_prompt_is_removed_from_a_template():
    turns = "{% for message in messages %}%s{{ message['content'] }}{% endfor %}"
    block = "{% if loop.first and messages[0]['role'] != 'system' %}{{ 'You are\nhelpful' }}{% endif %}"
    assert without_system_prompt(turns.replace("%s", block)) == turns.replace("%s", "")
    with pytest.raises(ValueError, match="no block that adds a default system prompt"):
        without_system_prompt(turns.replace("%s", ""))
