"""Contents of an installation, and consistency of the files that pin versions."""

import re
import subprocess
import sys

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from repository import ROOT

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def requirement_lines(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def pins_for(python: str) -> dict[str, str]:
    """Package → the version that constraints.txt pins under this Python; fails if two lines apply."""
    pins: dict[str, str] = {}
    for line in requirement_lines("constraints.txt"):
        if line.marker and not line.marker.evaluate(dict(default_environment(), python_version=python)):
            continue
        (specifier,) = line.specifier
        assert specifier.operator == "==", f"{line} is a range: constraints.txt holds exact versions"
        assert line.name not in pins, f"{line.name} is pinned twice under Python {python}"
        pins[line.name] = specifier.version
    return pins


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_one_tested_version_inside_its_range(python):
    pins = pins_for(python)
    for requirement in requirement_lines("requirements.txt"):
        assert requirement.specifier.contains(pins[requirement.name]), requirement


@pytest.mark.parametrize("python", PYTHONS)
def test_the_extras_are_pinned_too(python):
    extras = {"pytest", "pytest-xdist", "ruff", "gguf", "reasoning-gym", "lm-eval"}
    assert extras | {"mkdocs-material", "mkdocstrings-python", "latex2mathml"} <= pins_for(python).keys()


def test_an_installed_wheel_would_hold_every_module_of_dschat():
    """The packages that setup.py finds equal the folders that hold Python files."""
    query = "from setuptools import find_packages; print(*find_packages(include=['dschat', 'dschat.*']))"
    completed = subprocess.run([sys.executable, "-c", query], cwd=ROOT, capture_output=True, text=True, check=True)
    packages = set(completed.stdout.split())
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "dschat").rglob("*.py")}
    assert packages == {".".join(folder.parts) for folder in folders}


def test_the_version_is_read_from_the_package():
    version = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    source = (ROOT / "dschat" / "__init__.py").read_text(encoding="utf-8")
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", version)
    assert f'"{version}"' in source


def test_every_shell_script_parses():
    scripts = [*(ROOT / "scripts").glob("*.sh"), *(ROOT / "training").rglob("*.sh"), ROOT / ".ci" / "run"]
    assert scripts
    for script in scripts:
        outcome = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
        assert outcome.returncode == 0, outcome.stderr


def test_an_unknown_extra_is_refused_before_anything_is_created(tmp_path):
    outcome = subprocess.run(
        ["bash", ROOT / "scripts" / "install.sh", "tests"],
        env={"PATH": "/usr/bin:/bin", "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 1
    assert "'tests'" in outcome.stderr and "choose from test, smollm2" in outcome.stderr
    assert not (tmp_path / "venv").exists()


def test_a_missing_compiler_is_named_in_one_line(tmp_path):
    environment = {"PYTHON": sys.executable, "VENV": str(tmp_path / "venv"), "CXX": "no-such-compiler"}
    outcome = subprocess.run(
        ["bash", ROOT / "scripts" / "install.sh"],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 1
    assert len(outcome.stderr.splitlines()) == 1 and "g++" in outcome.stderr
    assert not (tmp_path / "venv").exists()
