"""The command `dschat`: from a checkout and from a wheel, subcommands, recipes, completion."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from repository import ROOT

import dschat
from dschat.command import COMMANDS, PROGRAMS, summary_of

MODULE = [sys.executable, "-m", "dschat"]


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120} | options
    return subprocess.run([*MODULE, *arguments], **options)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The unpacked files of a wheel, built from a copy of the repository without version control."""
    folder = tmp_path_factory.mktemp("wheel")
    copied = ["cp", "-r", *(str(ROOT / name) for name in ("dschat", "training", "scripts")), str(folder)]
    subprocess.run(copied, check=True)
    for name in ("setup.py", "pyproject.toml", "requirements.txt"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "wheels", "."]
    subprocess.run(build, cwd=folder, check=True, capture_output=True, timeout=300)
    (wheel,) = (folder / "wheels").glob("dschat-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "installed")
    return folder / "installed"


def test_the_overview_lists_every_command_with_a_purpose():
    lines = run().stdout.splitlines()
    for name in (*PROGRAMS, *COMMANDS):
        assert any(line.split()[:1] == [name] and len(line.split()) > 3 for line in lines), name


def test_every_program_exists_and_states_its_purpose():
    for path in PROGRAMS.values():
        assert summary_of(ROOT / path).endswith("."), path


def test_an_installed_wheel_runs_its_own_copies_of_the_programs(installed, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(installed)}
    for name, path in PROGRAMS.items():
        printed = run("path", name, env=environment, cwd=tmp_path).stdout.strip()
        assert printed == str(installed / "dschat" / "programs" / path) and Path(printed).is_file()
    helped = run("dpo", "--help", env=environment, cwd=tmp_path)
    assert helped.returncode == 0 and "--preference_loss" in helped.stdout
    assert "run_" in run("recipes", env=environment, cwd=tmp_path).stdout
    assert (installed / "dschat" / "py.typed").is_file()
    assert "dschat = dschat.command:entry_point" in next(installed.glob("*.dist-info/entry_points.txt")).read_text()


def test_a_program_gets_its_arguments_and_its_exit_status_is_returned():
    refused = run("sft", "--learning_rat", "1")
    assert refused.returncode == 2 and "--learning_rate" in refused.stderr


def test_unknown_commands_and_programs_are_refused_with_the_choices():
    for arguments in (["sftt"], ["path", "sftt"], ["path"], ["completion", "csh"]):
        refused = run(*arguments)
        assert refused.returncode == 2 and ("sft" in refused.stderr or "bash" in refused.stderr), arguments


def test_recipes_are_filtered_by_all_texts():
    every, some = (run("recipes", *texts).stdout.splitlines()[::2] for texts in ([], ["QWEN", "step3"]))
    assert 0 < len(some) < len(every)
    assert all("qwen" in path.lower() and "step3" in path for path in some)


@pytest.mark.parametrize("words, expected", [
    (["dschat", "rl"], {"rlhf"}),
    (["dschat", "rlhf", "--kl_c"], {"--kl_clip", "--kl_coef"}),
    (["dschat", "completion", "z"], {"zsh"}),
    (["dschat", "path", "dp"], {"dpo"}),
    (["dschat", "sft", "setup"], {"setup.py"}),
])  # fmt: skip
def test_bash_completes_commands_flags_and_files(words, expected):
    script = run("completion", "bash").stdout
    ask = f"{script}\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _dschat; echo \"${{COMPREPLY[@]}}\""
    answer = subprocess.run(["bash", "-c", ask], cwd=ROOT, capture_output=True, text=True)
    assert set(answer.stdout.split()) == expected, answer.stderr


def test_the_public_interface_is_complete_and_its_names_are_those_of_their_modules():
    assert {"gae", "policy_loss", "DeepSpeedRLHFEngine", "HybridEngine", "load_causal_lm"} <= set(dschat.__all__)
    for name in dschat.__all__:
        assert getattr(dschat, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        dschat.no_such_name  # noqa: B018
