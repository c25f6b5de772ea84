"""Import rules: dependencies point downwards only, and the pure modules need torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

# Pure tensor functions, in any package.
PURE = (
    "lazy_imports", "tensors", "softmax_head", "losses", "rlhf.advantages", "rlhf.group_advantages", "rlhf.algorithms",
    "rlhf.rollouts.score_shaping",
)  # fmt: skip
LEVELS = {
    "distributed": 1, "arguments": 1,
    "checkpoints": 2, "models": 2, "data": 2,
    "runs": 3, "rewards": 3, "generation": 3,
    "rlhf": 4, "preference": 4,
    "command": 5, "completion": 5, "__main__": 5,
}  # fmt: skip
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "dschat").rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def is_pure(module: str) -> bool:
    name = module.removeprefix("dschat").lstrip(".")
    return any(name == pure or name.startswith(f"{pure}.") for pure in PURE)


def level(module: str) -> int:
    name = module.removeprefix("dschat").lstrip(".")
    return 0 if not name or is_pure(module) else LEVELS[name.split(".")[0]]


def imports_of(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere, also inside functions."""
    package = path.parent
    modules: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.parts[: len(package.parts) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            folder = ROOT.joinpath(*base.split("."))
            for alias in node.names:
                is_module = (folder / f"{alias.name}.py").exists() or (folder / alias.name / "__init__.py").exists()
                modules.add(f"{base}.{alias.name}" if is_module else base)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "LazyFunctions":
            modules.add(node.args[0].value)
    return modules


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_module_imports_only_packages_of_its_own_level_or_below(path):
    above = {
        name for name in imports_of(path) if name.split(".")[0] == "dschat" and level(name) > level(module_of(path))
    }
    assert not above


@pytest.mark.parametrize("path", [path for path in FILES if is_pure(module_of(path))], ids=str)
def test_pure_modules_import_torch_and_other_pure_modules(path):
    outside = {
        name
        for name in imports_of(path)
        if name.split(".")[0] not in {"torch", *sys.stdlib_module_names} and not is_pure(name)
    }
    assert not outside


def test_collators_need_torch_alone():
    """They run in the workers of a data loader."""
    own_modules = {name for name in imports_of(Path("dschat/data/collators.py")) if name.startswith("dschat")}
    assert own_modules <= {"dschat.tensors"}


def test_importing_the_losses_loads_no_other_part_of_the_suite():
    script = (
        "import sys; from dschat.losses import POLICY_LOSSES, policy_loss; import dschat.rlhf.algorithms\n"
        "import dschat.rlhf.advantages\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('dschat', 'deepspeed', 'transformers')))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loaded = set(ast.literal_eval(loaded))
    assert {"dschat.losses.policy", "dschat.rlhf.advantages"} <= loaded
    assert all(is_pure(name) for name in loaded - {"dschat", "dschat.rlhf"})
