"""scripts/benchmark/dpo.py: the program accepts every run, and the first one is that of the quickstart."""

import sys
from pathlib import Path

import pytest
from repository import ROOT
from shell_commands import Command, commands_of

sys.path.insert(0, str(ROOT / "scripts" / "benchmark"))

import dpo  # noqa: E402


@pytest.fixture
def parsed(monkeypatch, tmp_path):
    """settings → the flags of its run, as the program parses them."""
    runs: list[dict] = []

    def record(program: str, flags: dict, log: Path) -> float:
        argv = tuple(word for flag, value in flags.items() for word in (f"--{flag}", str(value)))
        runs.append(Command(ROOT / program, argv, 1, 1).flags())
        return 1.0

    monkeypatch.setattr(dpo, "run", record)

    def parse(settings: dict[str, float]) -> dict:
        dpo.train(settings, tmp_path / "quickstart", tmp_path / "run", 7)
        return runs[-1]

    return parse


@pytest.mark.parametrize("settings", dpo.SETTINGS, ids=str)
def test_every_run_is_accepted_with_its_settings(settings, parsed):
    flags = parsed(settings)
    assert settings.items() <= flags.items() and flags["seed"] == 7


def test_the_first_run_is_that_of_the_quickstart(parsed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = commands_of('bash scripts/quickstart.sh --output "$PWD/out" --dpo', folder=tmp_path)
    (quickstart,) = [command.flags() for command in commands if command.step == "step2_dpo_finetuning"]
    flags = parsed(dpo.SETTINGS[0])
    different = {name for name in flags if flags[name] != quickstart[name]}
    # Files and the seed; data_split 0,1,0 takes the same rows as no split.
    assert different <= {"model_name_or_path", "data_path", "output_dir", "seed", "data_split"}
