"""Shell scripts with bad input: one message and status 2 before any output; foreign files are not removed."""

from __future__ import annotations

import os
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
    (["--output"], "--output wants a value"),
    (["--output", ""], "--output wants a value, not an empty one"),
    (["--output", "--fresh"], "--output --fresh: wants a value"),
    (["--output", "-folder"], "a path that begins with a dash is written ./-folder"),
    (["--output", "two\nlines"], "--output: its value has a line break"),
    (["--output", "a_file"], "a_file is no folder that can be written"),
    (["--output", "a_file/below"], "a_file is no folder that can be written"),
    (["--output", "dangling/below"], "dangling is no folder that can be written"),
]
CASES = [(script, words, part) for script in PIPELINES for words, part in EVERYWHERE]
for script, least_values in NUMBERS.items():
    for name, least in least_values.items():
        CASES += [(script, [f"--{name}", value], f"--{name} {value}: wants a whole number")
                  for value in ("word", "1.5", "1e3", "0x10", "+3", "3 4", "seed", "99999999999999999999")]  # fmt: skip
        CASES += [(script, [f"--{name}", "-1"], f"--{name} -1: wants a value")]
        CASES += [(script, [f"--{name}", str(least - 1)], f"must be at least {least}")] * (least > 0)
CASES += [
    ("smollm2", ["--dtype", "fp8"], "--dtype fp8: choose from bf16 fp32"),
    ("iterative_dpo", ["--dtype", "bf16 fp32 "], "choose from bf16 fp32"),
    ("iterative_dpo", ["--reference", "last"], "--reference last: choose from round first"),
    ("iterative_dpo", ["--judge", "judge.py"], "--judge judge.py: wants FILE.py:FUNCTION"),
    ("iterative_dpo", ["--judge", "judge.py:"], "--judge judge.py:: wants FILE.py:FUNCTION"),
    ("iterative_dpo", ["--judge", "missing.py:judge"], "wants FILE.py:FUNCTION, a file that is there"),
    ("iterative_dpo", ["--judge", "a_folder.py:judge"], "wants FILE.py:FUNCTION, a file that is there"),
    ("iterative_dpo", ["--judge", "a_file:judge"], "wants FILE.py:FUNCTION"),
    ("smollm2", ["--sft_flags", "--a 1\n--b 2"], "--sft_flags: its value has a line break"),
]
LATER = [  # checks that depend on the process count, which only the installed suite can determine
    ("smollm2", ["--processes", "2", "--sft_batch", "6"], "--sft_batch 6 is cut into 4 micro-batches"),
    ("smollm2", ["--processes", "1", "--reward_batch", "3"], "--reward_batch 3 is cut into 2 micro-batches"),
    ("chain_sum", ["--processes", "3"], "--processes 3: 8 sums are shared by 1, 2, 4 or 8"),
    ("iterative_dpo", ["--processes", "3"], "--batch 64 is cut over 3 processes"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "a_file").touch()
    (folder / "judge.py").touch()
    (folder / "a_folder.py").mkdir()
    (folder / "dangling").symlink_to("nowhere")
    (folder / "unfit-venv" / "bin").mkdir(parents=True)  # installing would fail with another message
    return folder


def run(script: str, words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", SCRIPTS / f"{script}.sh", *GIVEN.get(script, []), *words], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"VENV": str(folder / "unfit-venv"), "PYTHON": "false", "PROCESSES": ""} | environment,
        stdin=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip


def test_bad_options_are_one_message_and_status_2_and_nothing_is_made(place):
    before = sorted(place.rglob("*"))
    for script, words, part in CASES:
        done = run(script, words, place)
        assert (done.returncode, done.stdout) == (2, ""), (script, words, done)
        assert done.stderr.startswith(f"{script}: ") and part in done.stderr, (script, words, done.stderr)
        assert len(done.stderr.splitlines()) == 1, done.stderr
    assert sorted(place.rglob("*")) == before
    assert len(CASES) > 250


@pytest.mark.parametrize("value", ["word", "0", "-1", "2.5"])
def test_the_number_of_processes_of_the_quickstart_is_one(place, value):
    done = run("quickstart", [], place, PROCESSES=value)
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
def test_folders_and_files_of_others_stop_the_script_and_stay(script, name, fresh, tmp_path):
    (tmp_path / "judge.py").touch()
    precious = tmp_path / "out" / name
    if precious.suffix:
        precious.parent.mkdir()
    else:
        precious.mkdir(parents=True)
        precious = precious / "thesis.tex"
    precious.write_text("years of work")
    said = refusal(script, ["--output", "out", *fresh], tmp_path)
    assert f"/out/{name} was not made by this script, which would replace it: move it away" in said
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [precious]
    assert precious.read_text() == "years of work"


def test_what_the_script_made_it_replaces_and_the_rest_of_the_output_folder_stays(tmp_path):
    (tmp_path / "judge.py").touch()
    output = tmp_path / "out"
    (output / "other").mkdir(parents=True)
    (output / "other" / "notes").write_text("mine")
    (output / "data").mkdir()  # empty: nothing to lose

    def again(*words: str) -> int:
        return len(commands_of('bash scripts/quickstart.sh --output out "$@"', *words, folder=tmp_path))

    assert again() == 4
    (output / "sft" / "left over").touch()
    assert again() == 0, "all is done"
    assert again("--seed", "2") == 4
    assert not (output / "sft" / "left over").exists()
    (output / "ppo" / "left over").touch()
    assert again("--seed", "2", "--fresh") == 4
    assert not (output / "ppo" / "left over").exists() and (output / "other" / "notes").read_text() == "mine"
    assert "was not made by this script" in refusal("smollm2", ["--output", "out"], tmp_path), "it is another's"


def test_fresh_rounds_remove_those_of_more_rounds_before(tmp_path):
    (tmp_path / "judge.py").touch()
    command = 'bash scripts/iterative_dpo.sh --model m --prompts p --judge judge.py:judge --output out "$@"'
    commands_of(command, "--rounds", "3", folder=tmp_path)
    (tmp_path / "out" / "dpo-mine").mkdir()
    commands_of(command, "--rounds", "1", "--fresh", folder=tmp_path)
    names = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert names == {"dpo-mine", "pairs-1", "dpo-1", "stages", "logs"}


def test_a_script_whose_suite_is_not_installed_says_so(tmp_path):
    """Python without DeepSpeed: `read` on empty input would end the script without a message."""
    program = 'fail() { echo "s: $1" >&2; exit 2; }; set -euo pipefail; python() { return 1; }; source "$0/stages.sh"'
    done = subprocess.run(["bash", "-c", program, SCRIPTS], capture_output=True, text=True)
    assert done.returncode == 2 and "DeepSpeed does not work here" in done.stderr
