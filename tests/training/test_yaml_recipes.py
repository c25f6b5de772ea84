"""Every YAML recipe parses with its step's parser, fits its GPUs, and states the memory that the formulas give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import recipe_memory as memory
from shell_commands import ROOT, Command, commands_of
from test_recipes import DPO, STEP1, STEP2, STEP3, USABLE, problems_of
from test_recipes import folder as folder  # a fixture

RECIPES = sorted(ROOT.glob("training/*/training_scripts/*/*/*.yaml"))
KINDS = {STEP1: ["sft"], DPO: ["dpo"], STEP3: ["grpo_rule", "grpo_function", "ppo"]}
FAMILIES = sorted(path.name for path in (ROOT / "training" / STEP3 / "training_scripts").iterdir())


def named(path: Path) -> str:
    return str(path.relative_to(ROOT)).removeprefix("training/")


def header(path: Path) -> list[str]:
    """Lines of the comment at the top, without the hash."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("# "))
    return [line[2:] for line in lines[:end]]


def command_of(path: Path, folder: Path) -> Command:
    """The command of the header."""
    text = "\n".join(header(path))
    (line,) = re.findall(r"^ +(deepspeed (?:.*\\\n)*.*)$", text, re.MULTILINE)
    (command,) = commands_of(line, folder=folder)
    return command


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_the_command_in_the_header_starts_this_recipe_on_the_gpus_of_its_folder(path, folder):
    command = command_of(path, folder)
    assert command.arguments == ("--config", str(path.relative_to(ROOT)))
    assert command.program.parent == path.parents[3]
    assert problems_of(command) == []
    assert (command.processes == 1) == (path.parent.name == "single_gpu")
    assert (command.nodes > 1) == (path.parent.name == "multi_node")
    hardware = next(line for line in header(path) if line.startswith("Hardware: "))
    stated = {1: "one GPU ", 8: "one node of 8 GPUs "}.get(command.processes, f"{command.nodes} nodes of 8 GPUs ")
    assert hardware.startswith(f"Hardware: {stated}")


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_the_memory_in_the_header_is_that_of_the_formulas_and_fits(path, folder):
    command = command_of(path, folder)
    parts = memory.memory_parts(command.flags(), command.processes)
    lines = header(path)
    start = next(number for number, line in enumerate(lines) if line.startswith("Memory of a GPU in GB"))
    assert lines[start + 1 :] == [f"  {part}" for part in parts] + [f"  peak: {memory.peak(parts) / 1e9:.1f}"]
    (available,) = re.findall(r"GPUs? of (\d+) GB", "\n".join(lines))
    assert memory.peak(parts) <= USABLE * float(available) * 1e9


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_the_arithmetic_in_the_header_gives_its_figures(path):
    """Evaluated as it is written; it has numbers of parameters to three digits, and figures of one decimal."""
    lines = [line for line in header(path) if re.search(r" = [\d.]+$", line)]
    assert len(lines) >= 4
    for line in lines:
        arithmetic, figure = re.fullmatch(r".*?: (.*) = ([\d.]+)", line).groups()
        assert re.fullmatch(r"[\d.e+*/ ()]+", arithmetic)
        assert eval(arithmetic) / 1e9 == pytest.approx(float(figure), abs=0.051, rel=0.005), line


def test_every_kind_exists_in_four_sizes_and_every_family_has_grpo():
    names = {(path.parents[3].name, path.stem) for path in RECIPES}
    for step, kinds in KINDS.items():
        for kind in kinds:
            for size in ("0.5b", "1.5b", "7b", "70b"):
                assert (step, f"{kind}_{size}") in names
    with_grpo = {path.parents[1].name for path in RECIPES if path.stem.startswith("grpo")}
    assert sorted(with_grpo) == FAMILIES


def test_recipes_start_from_the_output_folders_of_recipes_of_earlier_steps(folder):
    earlier = [path for step in (STEP1, STEP2) for path in ROOT.glob(f"training/{step}/**/run_*.sh")]
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in earlier)
    for path in RECIPES:
        flags = command_of(path, folder).flags()
        models = [value for name, value in flags.items() if name.endswith("model_name_or_path") and value]
        local = [model for model in models if model.startswith("output/")]
        assert all(f"recipe {model} " in scripts for model in local)
        assert local or path.parents[3].name == STEP1
