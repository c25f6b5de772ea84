"""Everything that dschat imports is installed by requirements.txt, directly or as a dependency."""

import ast
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import ROOT

OPTIONAL = {"reasoning_gym", "liger_kernel", "triton", "vllm"}  # extras of setup.py; comes with torch for CUDA


def installed_with(names: list[str]) -> set[str]:
    """Names of these distributions and of everything that they require."""
    installed: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name in installed:
            continue
        try:
            required = [Requirement(line) for line in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:  # required on another platform only
            continue
        installed.add(name)
        names += [line.name for line in required if line.marker is None or line.marker.evaluate({"extra": ""})]
    return installed


def imported() -> set[str]:
    names: set[str] = set()
    for file in (ROOT / "dschat").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"dschat"} - OPTIONAL


def test_imports_come_with_the_requirements():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    installed = installed_with([Requirement(line).name for line in lines if line.strip() and not line.startswith("#")])
    distributions = metadata.packages_distributions()
    names = imported()
    assert {"torch", "math_verify"} <= names
    missing = {name for name in names if not {canonicalize_name(d) for d in distributions.get(name, [])} & installed}
    assert missing == set()
