"""What make_preferences stores of its settings, and the phases that the watchdog names."""

from __future__ import annotations

import json
import runpy
import shutil
import time

import pytest
from datasets import Dataset
from test_make_preferences import TOOL, arguments, folder  # noqa: F401  (a fixture)

from dschat.arguments import PairArguments, PairRunArguments, PairSettings, RewardArguments
from dschat.arguments.command_line import SettingsError, parse
from dschat.preference.pair_settings import settings_of_pairs
from dschat.preference.response_scoring import score_function
from dschat.rewards.response_batch import ResponseBatch


@pytest.fixture
def check():
    return runpy.run_path(str(TOOL), run_name="make_preferences")["check"]


def test_keys_in_reward_urls_are_not_stored_and_do_not_identify_the_run():
    def stored(*reward: str) -> dict:
        settings = PairSettings(
            sampling=PairArguments(model_name_or_path="nowhere"), rewards=RewardArguments(reward=list(reward)),
            run=PairRunArguments(output_dir="out"),
        )  # fmt: skip
        return settings_of_pairs(settings, Dataset.from_dict({"x": [1]}))

    first = stored("http://host/score?api_key=SECRET&model=a", "judge.py:reward?token=SECRET@2")
    assert "SECRET" not in json.dumps(first)
    assert first == stored("http://host/score?api_key=OTHER&model=a", "judge.py:reward?token=OTHER@2")
    assert first != stored("http://host/score?api_key=SECRET&model=b", "judge.py:reward?token=SECRET@2")


def test_mistakes_in_data_and_judge_are_found_before_the_output_folder_is_created(folder, check, tmp_path):  # noqa: F811
    output = tmp_path / "out"
    argv = arguments(folder, output, judge="no_such", data_path=tmp_path / "missing.jsonl")
    with pytest.raises(SettingsError) as caught:
        parse(PairSettings, list(map(str, argv)), description="", check=check)
    assert "judge.py has no function no_such" in str(caught.value)
    assert "missing.jsonl: there is no such file" in str(caught.value)
    parse(PairSettings, list(map(str, arguments(folder, output))), description="", check=check)
    assert not output.exists()


def test_a_reward_model_needs_positions_for_the_whole_response(folder, check, tmp_path):  # noqa: F811
    reward = tmp_path / "reward"
    shutil.copytree(folder / "reward", reward)
    config = json.loads((reward / "config.json").read_text())
    (reward / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    argv = arguments(folder, tmp_path / "out")
    at = argv.index("--judge")
    argv[at : at + 2] = ["--reward", reward]
    with pytest.raises(SettingsError, match="= 72 tokens, but .*reward has 16 positions"):
        parse(PairSettings, list(map(str, argv)), description="", check=check)


def test_a_hanging_judge_is_ended_by_its_time_limit(tmp_path, capsys):
    (tmp_path / "judge.py").write_text("import time\ndef judge(prompts, responses, rows):\n    time.sleep(20)\n")
    sampling = PairArguments(
        model_name_or_path="nowhere", judge=f"{tmp_path / 'judge.py'}:judge", judge_timeout=0.3, judge_retries=0
    )
    judge = score_function(PairSettings(sampling=sampling), tokenizer=None)
    started = time.monotonic()
    answers = ResponseBatch([[{"role": "user", "content": "a"}]], ["b"], [[1]], [{}], [True], 8)
    assert judge(None, answers) == [None] and time.monotonic() - started < 15
    assert "the judge returned no score for 1 of 1 responses (TimeoutError" in capsys.readouterr().err


PHASES = """
import runpy, sys
from dschat.distributed import watchdog
enter = watchdog.phase
def print_phase(name):
    print(f"<{name}>", flush=True)
    enter(name)
watchdog.phase = print_phase
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_every_batch_enters_the_phases_of_sampling_and_judging(folder, programs, tmp_path):  # noqa: F811
    """The phase stayed "start" for the whole run, so that the watchdog ended healthy runs."""
    (tmp_path / "phases.py").write_text(PHASES)
    printed = programs.run(
        tmp_path / "phases.py", [TOOL, *arguments(folder, tmp_path / "out")], log=tmp_path / "log"
    )
    phases = [line[1:-1] for line in printed.splitlines() if line.startswith("<")]
    for name in ("data preparation", "model loading"):
        assert name in phases
    assert [name for name in phases if name in ("sampling", "judging")] == ["sampling", "judging"] * 3
