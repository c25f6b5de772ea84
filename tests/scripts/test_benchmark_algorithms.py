"""scripts/benchmark/algorithms.py: the programs accept every run it starts, and its means are correct."""

import sys
from pathlib import Path

import pytest
from repository import ROOT
from shell_commands import Command

sys.path.insert(0, str(ROOT / "scripts" / "benchmark"))

import algorithms  # noqa: E402


@pytest.fixture
def started(monkeypatch) -> list[tuple[str, dict]]:
    """Program and flags of every run that would be started."""
    runs: list[tuple[str, dict]] = []

    def record(program: str, flags: dict, log: Path) -> float:
        runs.append((program, flags))
        return 12.5

    monkeypatch.setattr(algorithms, "run", record)
    return runs


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_algorithm_generates_the_same_number_of_responses(name, started, tmp_path):
    algorithms.prepare(tmp_path, 3, 60)
    output, seconds = algorithms.train(name, tmp_path, 3, 60)
    assert [program for program, _ in started if "training" in program] == [
        "training/step1_supervised_finetuning/main.py", "training/step3_rlhf_finetuning/main.py",
    ]  # fmt: skip
    for program, flags in (run for run in started if "training" in run[0]):
        argv = tuple(word for flag, value in flags.items() for word in (f"--{flag}", str(value)))
        parsed = Command(ROOT / program, argv, 1, 1).flags()
        assert parsed["seed"] == 3
    assert parsed["algorithm"] == name and seconds == 12.5 and parsed["output_dir"] == str(output)
    assert parsed["num_samples_per_prompt"] * parsed["per_device_generation_batch_size"] == algorithms.RESPONSES


def test_an_existing_sft_model_is_reused(started, tmp_path):
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "model.safetensors").touch()
    algorithms.prepare(tmp_path, 1, 2)
    assert started == []


def test_the_table_shows_means_and_the_worst_seed(capsys):
    row = {"algorithm": "grpo", "gold_reward_start": 0.4, "accuracy_end": 0.5, "seconds": 10.0}
    algorithms.print_table([row | {"seed": 1, "gold_reward_end": 1.0}, row | {"seed": 2, "gold_reward_end": 0.8}])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("grpo")]
    assert line.split() == ["grpo", "0.400", "0.900", "(0.800)", "0.500", "10"]
