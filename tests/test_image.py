"""The Dockerfile: the files that it copies exist and suffice, and it installs with scripts/install.sh."""

import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch

from repository import ROOT


def instructions() -> list[tuple[str, str]]:
    """(keyword, rest) of every instruction, continuations joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line]


def ignored(path: str) -> bool:
    patterns = (ROOT / ".dockerignore").read_text().split()
    return any(fnmatch(part, pattern.removeprefix("**/")) for pattern in patterns for part in path.split("/"))


def test_the_image_is_chosen_by_an_argument_and_does_not_run_as_root():
    steps = instructions()
    assert steps[0][0] == "ARG" and steps[0][1].startswith("BASE=nvidia/cuda:")
    assert steps[1] == ("FROM", "${BASE}")
    users = [rest for keyword, rest in steps if keyword == "USER"]
    assert users == ["dschat"]
    position = steps.index(("USER", "dschat"))
    as_root = [rest for keyword, rest in steps[:position] if keyword == "RUN"]
    assert f"useradd --create-home --shell /bin/bash {users[0]}" in as_root
    assert all("--chown=dschat" in rest for keyword, rest in steps if keyword == "COPY")


def test_the_system_packages_are_those_that_install_sh_asks_for():
    script = (ROOT / "scripts" / "install.sh").read_text()
    (packages,) = [rest for keyword, rest in instructions() if keyword == "RUN" and "apt-get" in rest]
    asked_for = set(re.findall(r"Debian: apt-get install ([\w+-]+)", script))
    assert len(asked_for) == 3 and asked_for <= set(packages.split())


def test_the_files_copied_before_the_installation_suffice_for_it(tmp_path):
    """Everything that install.sh and setup.py read is there, and the checksum of the stamps does not change later."""
    steps = instructions()
    run = next(i for i, (keyword, rest) in enumerate(steps) if keyword == "RUN" and "scripts/install.sh" in rest)
    assert re.fullmatch(r"PIP_NO_CACHE_DIR=1 bash scripts/install\.sh \$\{EXTRAS\}", steps[run][1])
    for keyword, rest in steps[:run]:
        if keyword != "COPY":
            continue
        _, *sources, target = rest.split()
        for source in sources:
            assert (ROOT / source).is_file() and not ignored(source), source
            (tmp_path / target).mkdir(exist_ok=True)
            shutil.copy(ROOT / source, tmp_path / target)
    script = (tmp_path / "scripts" / "install.sh").read_text()
    read = re.search(r'files=\("\$root/([\w.]+)" "\$root/([\w.]+)"\)', script).groups()
    assert all((tmp_path / name).is_file() for name in (*read, "constraints.txt", "pyproject.toml"))
    stub = tmp_path / "venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text(f'#!/bin/bash\n[[ "$1 $2" != "-m pip" ]] || {{ echo "$@" >>{tmp_path}/pip; exit; }}\n'
                    f'exec {sys.executable} "$@"\n')  # fmt: skip
    stub.chmod(0o755)
    (stub.parent / "ninja").write_text("#!/bin/bash\n")
    (stub.parent / "ninja").chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "VENV": str(tmp_path / "venv"), "CXX": "bash"}
    done = subprocess.run(
        ["bash", "scripts/install.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"-c {tmp_path}/constraints.txt -e {tmp_path}" in (tmp_path / "pip").read_text()
    version = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert version.split()[-1] == re.search(r'__version__ = "(.+)"', (ROOT / "dschat/__init__.py").read_text())[1]


def test_the_context_has_the_sources_but_no_environments_and_outputs():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    assert not [path for path in tracked.stdout.split() if ignored(path)]
    assert all(map(ignored, (".git", ".venv", ".venv-vllm", "output", "dschat/__pycache__", "dschat.egg-info")))
