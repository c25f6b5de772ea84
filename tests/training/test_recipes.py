"""Every documented command parses, has divisible batch sizes, and by calculation fits its GPUs."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import recipe_memory as memory
from shell_commands import ROOT, Command, commands_in_text, commands_of, module_of, settings_in_text

from dschat import arguments
from dschat.arguments.command_line import SettingsError
from dschat.rlhf.validation import rlhf_problems
from dschat.runs.validation import one_model_problems

STEP1, STEP2, STEP3 = "step1_supervised_finetuning", "step2_reward_model_finetuning", "step3_rlhf_finetuning"
DPO = "step2_dpo_finetuning"
RECIPES = sorted(ROOT.glob("training/*/training_scripts/*/*/run_*.sh"))
SHELL_SCRIPTS = sorted([*ROOT.glob("training/**/*.sh"), *ROOT.glob("scripts/**/*.sh"), ROOT / ".ci" / "run"])
PIPELINES = [path for path in SHELL_SCRIPTS if path.parent.name == "scripts" and STEP3 in path.read_text()]
TEXTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("training/**/*.md"), *ROOT.glob("scripts/**/*.md")])
SETTINGS = {name: content for path in TEXTS for name, content in settings_in_text(path).items()}
IN_TEXTS = [(path.relative_to(ROOT), line) for path in TEXTS for line in commands_in_text(path)]

CHECKS = {STEP1: partial(one_model_problems, "sft"), STEP2: partial(one_model_problems, "preference"),
          STEP3: rlhf_problems}  # fmt: skip
# Mistakes that begin so are about models and data that are not on this machine.
ABOUT_FILES = ("--data_path ", "--model_name_or_path ", "--actor_model_name_or_path ", "--critic_model_name_or_path ",
               "--reward_model_name_or_path ", "--reward ", "--ref_model_name_or_path ", "--eval_data_path ",
               "--judge ")  # fmt: skip

GPU_BYTES, USABLE = 80e9, 0.9  # the rest: CUDA, NCCL, DeepSpeed's buckets, fragmentation
LARGER_GPU_BYTES = {f"{STEP3}/training_scripts/opt/multi_node/run_66b.sh": 180e9,
                    f"{STEP3}/training_scripts/llama/multi_node/run_70b.sh": 180e9}  # fmt: skip


def named(path: Path) -> str:
    return str(path.relative_to(ROOT)).removeprefix("training/")


def recipe(path: Path, *more: str, folder: Path) -> Command:
    (command,) = commands_of(f'bash {path.relative_to(ROOT)} "$@"', *more, folder=folder)
    return command


def problems_of(command: Command) -> list[str]:
    """Problems that the program's own check reports, but those about files; SettingsError if parsing fails."""
    own = command.step == DPO or command.program.name != "main.py"
    check = module_of(command.program).check if own else CHECKS[command.step]
    return [problem for problem in check(command.parsed()) if not problem.startswith(ABOUT_FILES)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder: runs write output_dir there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_syntax(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_recipe_parses_and_its_batches_divide(path, folder):
    command = recipe(path, folder=folder)
    assert problems_of(command) == []
    assert (command.processes == 1) == (path.parent.name == "single_gpu")
    assert (command.nodes > 1) == (path.parent.name == "multi_node")
    lines = path.read_text().splitlines()
    assert len(lines) <= 25 and path.stat().st_mode & 0o100


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_recipe_fits_its_gpus(path, folder):
    command = recipe(path, folder=folder)
    flags = command.flags()
    ranks = [rank for name, rank in flags.items() if name.endswith("lora_dim")]
    assert any(ranks) == flags["only_optimize_lora"]
    needed = memory.peak(memory.memory_parts(flags, command.processes))
    assert needed <= USABLE * LARGER_GPU_BYTES.get(named(path), GPU_BYTES), f"{needed / 1e9:.1f} GB"


@pytest.mark.parametrize("name", memory.SHAPES)
def test_shapes_have_the_parameters_of_their_name(name):
    number, unit = re.fullmatch(r".*-([\d.]+)([mb])", name).groups()
    stated = float(number) * {"m": 1e6, "b": 1e9}[unit]
    assert memory.SHAPES[name].parameters == pytest.approx(stated, rel=0.1)


def test_memory_by_hand():
    """OPT-13b on 8 GPUs, ZeRO-3: 12.9e9 parameters x 18 bytes / 8; frozen and whole 2 bytes; LoRA 2 and a little."""
    shape = memory.SHAPES["opt-13b"]
    assert shape.parameters == 40 * (4 * 5120**2 + 2 * 5120 * 20480) + 50272 * 5120
    total = lambda parts: sum(part.bytes for part in parts)  # noqa: E731
    sharded = memory.trained("", shape, stage=3, gpus=8, lora=0, offload=False)
    assert total(sharded) == pytest.approx(shape.parameters * 18 / 8)
    whole_weights = memory.trained("", shape, stage=2, gpus=8, lora=0, offload=False)
    assert total(whole_weights) == shape.parameters * (2 + 16 / 8)
    assert total(memory.frozen("", shape, stage=2, gpus=8, offload=False)) == shape.parameters * 2
    adapters = 40 * 64 * (4 * 2 * 5120 + 2 * 5 * 5120)
    with_adapters = memory.trained("", shape, stage=2, gpus=1, lora=64, offload=False)
    assert total(with_adapters) == shape.parameters * 2 + adapters * 18
    assert total(memory.rollout(shape, sequences=8, tokens=512, stage=2, lora=0)) == 8 * 512 * 40 * 2 * 5120 * 2
    parts = [*memory.rollout(shape, sequences=8, tokens=512, stage=3, lora=0), memory.Part("", "", 5e9, "update"),
             memory.Part("", "", 1e9)]  # fmt: skip
    assert memory.peak(parts) == 1e9 + shape.parameters * 2 + 8 * 512 * 40 * 2 * 5120 * 2


def test_recipes_start_from_output_folders_of_earlier_recipes(folder):
    written: dict[str, set[str]] = {}
    inputs: dict[str, set[str]] = {"actor_model_name_or_path": set(), "reward_model_name_or_path": set()}
    for path in sorted(RECIPES, key=lambda path: STEP1 not in path.parts):
        command = recipe(path, folder=folder)
        flags = command.flags()
        written.setdefault(command.step, set()).add(flags["output_dir"])
        if command.step == DPO:
            assert flags["model_name_or_path"] in written[STEP1]
        for name in inputs:
            inputs[name] |= {flags[name]} if name in flags else set()
    assert inputs["actor_model_name_or_path"] <= written[STEP1]
    assert inputs["reward_model_name_or_path"] <= written[STEP2]


def test_flags_of_the_command_line_override_the_recipe_and_mistakes_are_detected(folder):
    """The checks above would detect batches that do not divide, a misspelt flag, a value out of its choices."""
    path = ROOT / "training" / STEP3 / "training_scripts" / "opt" / "single_node" / "run_1.3b.sh"
    command = recipe(path, "--per_device_training_batch_size", "7", folder=folder)
    assert "do not divide" in "".join(problems_of(command))
    with pytest.raises(SettingsError, match="did you mean --kl_coef"):
        recipe(path, "--kl_coeff", "0.1", folder=folder).parsed()
    with pytest.raises(SettingsError, match="--actor_zero_stage 4"):
        recipe(path, "--actor_zero_stage", "4", folder=folder).parsed()


@pytest.mark.parametrize("arguments_", [(), ("--short", "--fresh"), ("--dpo",)], ids=["", "short", "dpo"])
@pytest.mark.parametrize("script", PIPELINES, ids=lambda path: path.name)
def test_commands_of_pipeline_scripts_parse(script, arguments_, folder):
    if arguments_ and script.name != "quickstart.sh":
        pytest.skip("only the quickstart has --short and --dpo")
    commands = commands_of(f'bash scripts/{script.name} --output "$PWD/out put" "$@"', *arguments_, folder=folder)
    from_rules = script.name == "chain_sum.sh"  # needs no reward model
    expected = {STEP1, STEP3} | (set() if from_rules else {STEP2}) | ({DPO} if "--dpo" in arguments_ else set())
    assert {command.step for command in commands} == expected
    for command in commands:
        assert problems_of(command) == []


@pytest.mark.parametrize("reference", ["round", "first"])
def test_each_round_of_iterative_dpo_starts_from_the_model_before(reference, folder):
    (folder / "judge.py").touch()
    commands = commands_of(
        'bash scripts/iterative_dpo.sh --model sft --prompts p.jsonl --judge "$PWD/judge.py:judge" --rounds 2 "$@"',
        "--output", str(folder / "out"), "--reference", reference, "--dpo_flags", "--beta 0.3", folder=folder,
    )  # fmt: skip
    assert [command.program.name for command in commands] == ["make_preferences.py", "main.py"] * 2
    flags = [command.flags() for command in commands]
    for command in commands:
        assert problems_of(command) == []
    first, second = (str(folder / "out" / f"dpo-{number}") for number in (1, 2))
    assert [f["model_name_or_path"] for f in flags] == ["sft", "sft", first, first]
    assert [f["output_dir"] for f in flags[1::2]] == [first, second]
    assert [f["ref_model_name_or_path"] for f in flags[1::2]] == ["sft", first if reference == "round" else "sft"]
    assert flags[1]["data_path"] == [f"{flags[0]['output_dir']}/preferences.jsonl"] and flags[1]["beta"] == 0.3
    assert flags[0]["seed"] != flags[2]["seed"], "each round samples with another seed"


@pytest.mark.parametrize(("text", "line"), IN_TEXTS, ids=[f"{text}:{n}" for n, (text, _) in enumerate(IN_TEXTS)])
def test_commands_in_documents_parse(text, line, folder):
    for name, content in SETTINGS.items():
        (folder / name).write_text(content, encoding="utf-8")
    commands = commands_of(f"set -euo pipefail\n{line}", folder=folder)
    assert commands, f"{line!r} in {text} starts no program"
    for command in commands:
        assert problems_of(command) == []


def test_every_step_has_recipes_and_commands_in_its_readme():
    for step in (STEP1, STEP2, DPO, STEP3):
        assert {path.parent.name for path in RECIPES if step in path.parts} == {
            "single_gpu", "single_node", "multi_node"
        }  # fmt: skip
        assert sum(str(text).startswith(f"training/{step}") for text, _ in IN_TEXTS) >= 4


def every_flag() -> set[str]:
    groups = [group for _, group in inspect.getmembers(arguments, dataclasses.is_dataclass)]
    return {field.name for group in groups if hasattr(group, "problems") for field in dataclasses.fields(group)}


@pytest.mark.parametrize("step", [STEP1, STEP2, DPO, STEP3])
def test_every_flag_in_the_readme_of_a_step_exists(step):
    of_launchers = {"config", "help", "num_accelerators", "num_gpus", "nproc_per_node", "nodes"}
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("*.py"))
    flags = every_flag() | set(re.findall(r"add_argument\(\s*\"--(\w+)", scripts))
    named_flags = set(re.findall(r"--(\w+)", (ROOT / "training" / step / "README.md").read_text(encoding="utf-8")))
    assert len(named_flags) > 20
    assert named_flags - flags - of_launchers == set()


def test_every_flag_is_read_by_something():
    """A field counts as read where its name is an attribute in code."""
    not_read_on_purpose = {"local_rank"}  # the deepspeed launcher passes it; the environment has it too
    flags = every_flag()
    read = {
        node.attr
        for top in ("dschat", "training")
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    if "columns" in read:  # DataArguments.columns reads them all
        read |= {name for name in flags if name.endswith("_column")}
    assert flags - read - not_read_on_purpose == set()
