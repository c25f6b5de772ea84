"""What make_preferences stores of its settings, and the phases that the watchdog names."""

from __future__ import annotations

import json
import shutil
import time

import pytest
from datasets import Dataset
from test_make_preferences import TOOL, arguments, folder, tool  # noqa: F401  (fixtures)

from dschat.arguments import PairArguments, PairDeviceArguments, PairRunArguments, PairSettings, RewardArguments
from dschat.arguments.command_line import SettingsError, parse
from dschat.rewards.answers import Answers


def test_keys_of_reward_addresses_are_not_stored_and_a_new_key_is_the_same_run(tool):  # noqa: F811
    def stored(*reward: str) -> dict:
        return tool.decisive_settings(
            PairArguments(model_name_or_path="nowhere"), RewardArguments(reward=list(reward)),
            PairDeviceArguments(), PairRunArguments(output_dir="out"), Dataset.from_dict({"x": [1]}),
        )  # fmt: skip

    first = stored("http://host/score?api_key=SECRET&model=a", "judge.py:reward?token=SECRET@2")
    assert "SECRET" not in json.dumps(first)
    assert first == stored("http://host/score?api_key=OTHER&model=a", "judge.py:reward?token=OTHER@2")
    assert first != stored("http://host/score?api_key=SECRET&model=b", "judge.py:reward?token=SECRET@2")


def test_mistakes_in_data_and_judge_are_found_before_the_output_folder_is_made(folder, tool, tmp_path):  # noqa: F811
    output = tmp_path / "out"
    argv = arguments(folder, output, judge="no_such", data_path=tmp_path / "missing.jsonl")
    with pytest.raises(SettingsError) as caught:
        parse(PairSettings, list(map(str, argv)), description="", check=tool.check)
    assert "judge.py has no function no_such" in str(caught.value)
    assert "missing.jsonl: there is no such file" in str(caught.value)
    parse(PairSettings, list(map(str, arguments(folder, output))), description="", check=tool.check)
    assert not output.exists()


def test_a_reward_model_that_reads_the_answers_ids_needs_positions_for_all_of_them(folder, tool, tmp_path):  # noqa: F811
    reward = tmp_path / "reward"
    shutil.copytree(folder / "reward", reward)
    config = json.loads((reward / "config.json").read_text())
    (reward / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    argv = arguments(folder, tmp_path / "out")
    at = argv.index("--judge")
    argv[at : at + 2] = ["--reward", reward]
    with pytest.raises(SettingsError, match="= 72 tokens, but .*reward has 16 positions"):
        parse(PairSettings, list(map(str, argv)), description="", check=tool.check)


def test_a_judge_that_hangs_costs_its_time_limit_and_no_more(tool, tmp_path, capsys):  # noqa: F811
    (tmp_path / "judge.py").write_text("import time\ndef judge(prompts, responses, rows):\n    time.sleep(20)\n")
    judge = tool.judge_of(
        PairArguments(
            model_name_or_path="nowhere", judge=f"{tmp_path / 'judge.py'}:judge", judge_timeout=0.3, judge_retries=0
        )
    )
    started = time.monotonic()
    answers = Answers([[{"role": "user", "content": "a"}]], ["b"], [[1]], [{}], [True], 8)
    assert judge(None, answers) == [None] and time.monotonic() - started < 15
    assert "the judge gave no score to 1 of 1 responses (TimeoutError" in capsys.readouterr().err


PHASES = """
import runpy, sys
from dschat.distributed import watchdog
enter = watchdog.phase
def noted(name):
    print(f"<{name}>", flush=True)
    enter(name)
watchdog.phase = noted
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_every_batch_enters_the_phases_of_sampling_and_judging(folder, programs, tmp_path):  # noqa: F811
    """The phase stayed "start" for the whole run, so that the watchdog ended healthy runs."""
    (tmp_path / "phases.py").write_text(PHASES)
    said = programs.run(
        tmp_path / "phases.py", [TOOL, *arguments(folder, tmp_path / "out")], log=tmp_path / "log"
    )
    phases = [line[1:-1] for line in said.splitlines() if line.startswith("<")]
    for name in ("data preparation", "model loading"):
        assert name in phases
    assert [name for name in phases if name in ("sampling", "judging")] == ["sampling", "judging"] * 3
