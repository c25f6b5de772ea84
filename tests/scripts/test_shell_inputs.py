"""Shell scripts with bad input: one message and status 2 before any output; foreign files are not removed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from shell_commands import ROOT, commands_of

SCRIPTS = ROOT / "scripts"
PIPELINES = ("quickstart", "smollm2", "chain_sum", "iterative_dpo")
GIVEN = {"iterative_dpo": ["--model", "m", "--prompts", "p", "--judge", "judge.py:judge"]}
NUMBERS = {
    "quickstart": {"seed": 0},
    "chain_sum": {"seed": 0, "processes": 1, "sft_steps": 1, "iterations": 1},
    "smollm2": {"seed": 0, "processes": 1, "sft_steps": 1, "sft_batch": 1, "reward_steps": 1, "reward_batch": 1,
                "ppo_iterations": 1, "ppo_batch": 1, "answer": 1},
    "iterative_dpo": {"seed": 0, "rounds": 1, "max_prompt": 1, "max_answer": 1, "samples": 2, "pairs": 1, "batch": 1,
                      "processes": 1},
}  # fmt: skip
EVERYWHERE = [
    (["--no_such"], "unknown option '--no_such' (--help lists them)"),
    (["--no-such", "3"], "unknown option '--no-such'"),
    (["--seed=3"], "unknown option '--seed=3'"),
    (["word"], "unknown option 'word'"),
    (["--"], "unknown option '--'"),
    ([""], "unknown option ''"),
    (["--option[0]", "3"], "unknown option '--option[0]'"),
    (["--$(touch made)", "3"], "unknown option"),
    (["--output"], "--output needs a value"),
    (["--output", ""], "--output needs a value that is not empty"),
    (["--output", "--fresh"], "--output --fresh: needs a value"),
    (["--output", "-folder"], "write ./-folder for a path that begins with a dash"),
    (["--output", "two\nlines"], "--output: its value has a line break"),
    (["--output", "a_file"], "a_file is not a writable folder"),
    (["--output", "a_file/below"], "a_file is not a writable folder"),
    (["--output", "dangling/below"], "dangling is not a writable folder"),
]
CASES = [(script, words, part) for script in PIPELINES for words, part in EVERYWHERE]
for script, least_values in NUMBERS.items():
    for name, least in least_values.items():
        CASES += [(script, [f"--{name}", value], f"--{name} {value}: must be a whole number")
                  for value in ("word", "1.5", "1e3", "0x10", "+3", "3 4", "seed", "99999999999999999999")]  # fmt: skip
        CASES += [(script, [f"--{name}", "-1"], f"--{name} -1: needs a value")]
        CASES += [(script, [f"--{name}", str(least - 1)], f"must be at least {least}")] * (least > 0)
CASES += [
    ("smollm2", ["--dtype", "fp8"], "--dtype fp8: choose from bf16 fp32"),
    ("iterative_dpo", ["--dtype", "bf16 fp32 "], "choose from bf16 fp32"),
    ("iterative_dpo", ["--reference", "last"], "--reference last: choose from round first"),
    ("iterative_dpo", ["--judge", "judge.py"], "--judge judge.py: must be FILE.py:FUNCTION"),
    ("iterative_dpo", ["--judge", "judge.py:"], "--judge judge.py:: must be FILE.py:FUNCTION"),
    ("iterative_dpo", ["--judge", "missing.py:judge"], "must be FILE.py:FUNCTION, with an existing file"),
    ("iterative_dpo", ["--judge", "a_folder.py:judge"], "must be FILE.py:FUNCTION, with an existing file"),
    ("iterative_dpo", ["--judge", "a_file:judge"], "must be FILE.py:FUNCTION"),
    ("smollm2", ["--sft_flags", "--a 1\n--b 2"], "--sft_flags: its value has a line break"),
]
LATER = [  # checks that depend on the process count, which only the installed suite can determine
    ("smollm2", ["--processes", "2", "--sft_batch", "6"], "--sft_batch 6 must be a multiple of its 4"),
    ("smollm2", ["--processes", "1", "--reward_batch", "3"], "--reward_batch 3 must be a multiple of its 2"),
    ("chain_sum", ["--processes", "3"], "--processes 3: must divide the 8 sums of an update"),
    ("iterative_dpo", ["--processes", "3"], "--batch 64 must be a multiple of the 3 processes"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    inputs = tmp_path_factory.mktemp("inputs")
    (inputs / "a_file").touch()
    (inputs / "judge.py").touch()
    (inputs / "a_folder.py").mkdir()
    (inputs / "dangling").symlink_to("nowhere")
    (inputs / "unfit-venv" / "bin").mkdir(parents=True)  # installing would fail with another message
    return inputs


def run(script: str, words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", SCRIPTS / f"{script}.sh", *GIVEN.get(script, []), *words], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"VENV": str(folder / "unfit-venv"), "PYTHON": "false", "PROCESSES": ""} | environment,
        stdin=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip


def test_bad_options_are_one_message_and_status_2_before_any_output(folder):
    before = sorted(folder.rglob("*"))
    for script, words, part in CASES:
        done = run(script, words, folder)
        assert (done.returncode, done.stdout) == (2, ""), (script, words, done)
        assert done.stderr.startswith(f"{script}: ") and part in done.stderr, (script, words, done.stderr)
        assert len(done.stderr.splitlines()) == 1, done.stderr
    assert sorted(folder.rglob("*")) == before
    assert len(CASES) > 250


@pytest.mark.parametrize("value", ["word", "0", "-1", "2.5"])
def test_an_invalid_PROCESSES_is_one_message_and_status_2(folder, value):
    done = run("quickstart", [], folder, PROCESSES=value)
    assert done.returncode == 2 and f"PROCESSES {value}: " in done.stderr and done.stderr.count("\n") == 1


def refusal(script: str, words: list[str], folder: Path) -> str:
    """The error of a script whose programs are all stubs. No program of training/ may have started."""
    command = " ".join(f"'{word}'" for word in GIVEN.get(script, []))
    with pytest.raises(AssertionError) as refused:
        commands_of(f'bash scripts/{script}.sh {command} "$@"', *words, folder=folder)
    assert "training/" not in (folder / "commands").read_text()
    return str(refused.value)


@pytest.mark.parametrize(("script", "words", "part"), LATER)
def test_batches_that_do_not_divide_stop_the_script_before_its_first_stage(script, words, part, tmp_path):
    (tmp_path / "judge.py").touch()
    assert part in refusal(script, [*words, "--output", "out"], tmp_path)
    assert not (tmp_path / "out").exists()


def test_numbers_are_decimal_also_with_a_leading_zero(tmp_path):
    (tmp_path / "judge.py").touch()
    command = "bash scripts/iterative_dpo.sh --model m --prompts p --judge judge.py:judge --output out"
    commands = commands_of(f"{command} --rounds 01 --seed 08 --batch 010", folder=tmp_path)
    flags = [command.flags() for command in commands]
    assert [flag["seed"] for flag in flags] == [9, 8] and flags[1]["per_device_train_batch_size"] == 10


@pytest.mark.parametrize("fresh", [[], ["--fresh"]], ids=["", "fresh"])
@pytest.mark.parametrize(
    ("script", "name"),
    [("quickstart", "data"), ("quickstart", "ppo"), ("smollm2", "model"), ("chain_sum", "level1"),
     ("iterative_dpo", "dpo-1"), ("iterative_dpo", "logs"), ("chain_sum", "report.html"), ("smollm2", "summary.json")],
)  # fmt: skip
def test_folders_that_the_script_did_not_create_stop_it_and_are_kept(script, name, fresh, tmp_path):
    (tmp_path / "judge.py").touch()
    precious = tmp_path / "out" / name
    if precious.suffix:
        precious.parent.mkdir()
    else:
        precious.mkdir(parents=True)
        precious = precious / "thesis.tex"
    precious.write_text("years of work")
    message = refusal(script, ["--output", "out", *fresh], tmp_path)
    assert f"/out/{name} was not made by this script, which would replace it: move it away" in message
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [precious]
    assert precious.read_text() == "years of work"


def test_only_folders_that_the_script_created_are_replaced(tmp_path):
    (tmp_path / "judge.py").touch()
    output = tmp_path / "out"
    (output / "other").mkdir(parents=True)
    (output / "other" / "notes").write_text("keep")
    (output / "data").mkdir()  # empty: nothing to lose

    def run_again(*words: str) -> int:
        return len(commands_of('bash scripts/quickstart.sh --output out "$@"', *words, folder=tmp_path))

    assert run_again() == 4
    seconds, digest, *more = (output / "stages" / "sft").read_text().split("\n")
    assert seconds.isdecimal() and re.fullmatch("[0-9a-f]{64}  -", digest) and more == [""], "commands may hold keys"
    (output / "sft" / "stale").touch()
    assert run_again() == 0, "all stages are finished"
    assert run_again("--seed", "2") == 4
    assert not (output / "sft" / "stale").exists()
    (output / "ppo" / "stale").touch()
    assert run_again("--seed", "2", "--fresh") == 4
    assert not (output / "ppo" / "stale").exists() and (output / "other" / "notes").read_text() == "keep"
    assert "was not made by this script" in refusal("smollm2", ["--output", "out"], tmp_path), "of quickstart"


def test_fresh_removes_further_rounds_of_an_earlier_run(tmp_path):
    (tmp_path / "judge.py").touch()
    command = 'bash scripts/iterative_dpo.sh --model m --prompts p --judge judge.py:judge --output out "$@"'
    commands_of(command, "--rounds", "3", folder=tmp_path)
    (tmp_path / "out" / "dpo-mine").mkdir()
    commands_of(command, "--rounds", "1", "--fresh", folder=tmp_path)
    names = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert names == {"dpo-mine", "pairs-1", "dpo-1", "stages", "logs"}


def test_a_missing_deepspeed_is_one_message_and_status_2(tmp_path):
    """Python without DeepSpeed: `read` on empty input would end the script without a message."""
    program = 'fail() { echo "s: $1" >&2; exit 2; }; set -euo pipefail; python() { return 1; }; source "$0/stages.sh"'
    done = subprocess.run(["bash", "-c", program, SCRIPTS], capture_output=True, text=True)
    assert done.returncode == 2 and "DeepSpeed does not work here" in done.stderr
