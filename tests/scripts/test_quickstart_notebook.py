"""scripts/quickstart.ipynb: a valid notebook without outputs, whose commands exist and whose cells run."""

import ast
import json
import os
import re
import sys
from types import ModuleType

import pytest
from repository import ROOT, SCRIPTS
from shell_commands import commands_of

NOTEBOOK = json.loads((SCRIPTS / "quickstart.ipynb").read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_format_is_4_5_and_nothing_was_executed():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert NOTEBOOK.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert NOTEBOOK["metadata"]["kernelspec"].keys() >= {"name", "display_name"}
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in ids)
    for cell in NOTEBOOK["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell["cell_type"] in ("code", "markdown") and isinstance(cell["metadata"], dict)
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | code
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


@pytest.mark.parametrize("source", CODE, ids=range(len(CODE)))
def test_every_cell_is_python_and_the_files_that_it_names_exist(source):
    compile(source, "cell", "exec")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("scripts/"):
            assert (ROOT / node.value).is_file(), node.value


def commands_in_cells(*, short: bool) -> list[tuple[str, ...]]:
    """The commands that `run` gets in the cells that call nothing else of the notebook."""
    commands: list[tuple[str, ...]] = []
    variables = {"run": lambda *command, lines="": commands.append(command), "SHORT": short, "SEED": 3, "OUTPUT": "out"}
    for source in CODE:
        if source.startswith("run("):
            exec(compile(source, "cell", "exec"), variables)
    return commands


@pytest.mark.parametrize("short", [False, True])
def test_the_quickstart_is_called_with_options_that_it_has(short, tmp_path):
    (command,) = commands_in_cells(short=short)
    programs = [call.program.parent.name for call in commands_of(" ".join(command), folder=tmp_path)]
    assert programs[0] == "step1_supervised_finetuning" and programs[-1] == "step3_rlhf_finetuning"
    assert ("--short" in command) == short


def execute(cells: list[str], *, settings: dict, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Execute cells as Jupyter does, one after the other; `settings` replace those of the first cell."""
    display = ModuleType("IPython.display")
    display.shown = []
    display.HTML, display.display = str, display.shown.append
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    variables: dict = {"shown": display.shown}
    for number, source in enumerate(cells):
        exec(compile(source, f"cell {number}", "exec"), variables)
        variables |= settings if number == 0 else {}
    return variables


def test_outside_a_checkout_the_repository_must_be_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="set REPOSITORY"):
        execute(CODE[:2], settings={}, monkeypatch=monkeypatch)


def test_outside_a_checkout_the_repository_is_cloned(tmp_path, monkeypatch):
    origin = tmp_path / "origin"
    (origin / "scripts").mkdir(parents=True)
    (origin / "scripts" / "quickstart.sh").write_text("echo cloned; exit 3\n")
    git = "git -c user.name=a -c user.email=a@b -c init.defaultBranch=main"
    assert os.system(f"cd {origin} && {git} init -q && {git} add . && {git} commit -qm a") == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VENV", "venv")
    monkeypatch.setenv("PYTHON", "python3")  # the cell sets it
    variables = execute(CODE[:2], settings={"REPOSITORY": str(origin)}, monkeypatch=monkeypatch)
    assert variables["root"] == tmp_path / "dschat"
    with pytest.raises(RuntimeError, match="status 3"):
        variables["run"]("bash", "scripts/quickstart.sh")


@pytest.mark.slow
def test_all_cells_but_the_installation_run_and_show_the_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT / "scripts")
    monkeypatch.setenv("VENV", sys.prefix)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    cells = [source for source in CODE if "scripts/install.sh" not in source]
    assert len(cells) == len(CODE) - 1
    settings = {"SHORT": True, "OUTPUT": str(tmp_path / "out"), "USE_GPU": False}
    variables = execute(cells, settings=settings, monkeypatch=monkeypatch)
    text = capsys.readouterr().out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert f"PPO {summary['accuracy_ppo']:6.3f}" in text and "step   3  score" in text
    (shown,) = variables["shown"]
    assert shown.startswith("<iframe") and len(shown) > 10_000
    assert summary["prompts"] == 32 and not (ROOT / "output" / "notebook").exists()
