"""Links, paths, flags and metrics named in the READMEs and in CONTRIBUTING exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("training/*/README.md"), *ROOT.glob("scripts/**/*.md")]
)
SOURCES = [path for folder in ("dschat", "training", "scripts") for path in (ROOT / folder).rglob("*.py")]
PROGRAMS = [*SOURCES, *ROOT.glob("scripts/**/*.sh"), ROOT / "tests" / "soak.py"]
PACKAGES = [path.name for path in (ROOT / "dschat").iterdir() if (path / "__init__.py").exists()]
# Flags of deepspeed, torchrun, srun, pip and pytest in commands.
LAUNCHER_FLAGS = {"num_gpus", "num_accelerators", "hostfile", "nproc_per_node", "nodes", "ntasks", "node_rank", "help"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_to_files_and_headings(path):
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    missing = []
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_paths_in_code_spans_exist(path):
    """A path starts at the repository's root, or below dschat/ with the name of a package; .py may be omitted."""
    tops = "|".join(["dschat", "training", "scripts", "tests", *PACKAGES])
    names = [
        word for span in code_spans(path.read_text(encoding="utf-8")) for word in span.split()
        if re.fullmatch(rf"({tops})/[\w./]+", word)
    ]  # fmt: skip
    code = "\n".join(source.read_text(encoding="utf-8") for source in SOURCES)
    missing = [
        name for name in names if "NAME" not in name and f'"{name}"' not in code  # a placeholder, a metric
        and not any((root / f"{name}{suffix}").exists() for root in (ROOT, ROOT / "dschat") for suffix in ("", ".py"))
    ]  # fmt: skip
    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_flags_exist(path):
    code = "\n".join(source.read_text(encoding="utf-8") for source in PROGRAMS)
    valid = LAUNCHER_FLAGS | set(re.findall(r"--(\w+)", code)) | set(re.findall(r"^    (\w+): .*= flag\(", code, re.M))
    valid |= set(re.findall(r"^\s+\[?(\w+)\]?=", code, re.M))  # options of shell scripts: declare -A option=([name]=…)
    flags = set(re.findall(r"(?<![\w-])--(\w+)", path.read_text(encoding="utf-8")))
    assert flags - valid == set()


@pytest.mark.parametrize("path", sorted(ROOT.glob("training/*/README.md")), ids=name_of)
def test_metrics_are_logged(path):
    """Each name in the section "Metrics" is a string of the code, or the part of an f-string after its prefix."""
    text = path.read_text(encoding="utf-8")
    section = text[text.index("## Metrics") :]
    section = section[: section.index("\n## ")]
    metrics = {span for span in code_spans(section) if re.fullmatch(r"[a-z][a-z_0-9]+", span)}
    code = "\n".join(source.read_text(encoding="utf-8") for source in SOURCES)
    strings = set(re.findall(r"[\w{}]+", "\n".join(re.findall(r"\"([^\"\n]*)\"", code))))
    flags = set(re.findall(r"^    (\w+): ", code, re.M))
    prefixes = ("seconds_", "eval_", "actor_", "critic_", "chosen_", "rejected_", "desirable_", "undesirable_",
                "correction_")  # fmt: skip
    assert len(metrics) > 4

    def is_logged(name: str) -> bool:
        stems = {name} | {name.removeprefix(prefix) for prefix in prefixes}
        ending = f"{{name}}_{name.partition('_')[2]}"  # of f"{name}_grad_norm"
        return bool(stems & (strings | flags)) or any(ending in string for string in strings)

    assert {name for name in metrics if not is_logged(name)} == set()


def sections_of(text: str) -> list[tuple[str, str]]:
    """Each section, from its heading to the next: its whole text, and that without blocks of code."""
    sections, in_code = [["", ""]], False
    for line in text.splitlines(keepends=True):
        is_fence = line.startswith("```")
        in_code = in_code != is_fence
        if not in_code and re.match("#+ ", line):
            sections.append(["", ""])
        sections[-1][0] += line
        sections[-1][1] += "" if in_code or is_fence else line
    return [(whole, prose) for whole, prose in sections]


def tables_of(prose: str) -> list[list[str]]:
    """Cells of the body of each table, without the first column."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", prose, re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in block.splitlines()[2:]]
        tables.append([cell.strip() for row in rows for cell in row[1:]])
    return tables


def is_measured(cells: list[str]) -> bool:
    """Whether most cells are results: decimals, or numbers with thousands separators."""
    numbers = [cell for cell in cells if re.fullmatch(r"[-\d.,; →]*\d[.,]\d[-\d.,; →]*", cell)]
    return len(numbers) > len(cells) / 2


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_tables_of_measured_numbers_name_their_command_and_their_rows(path):
    if path.parent.name == "results":
        return  # their .jsonl files lie beside them
    for section, prose in sections_of(path.read_text(encoding="utf-8")):
        if any(map(is_measured, tables_of(prose))):
            title = section.partition("\n")[0]
            links = re.findall(r"\]\(([^)\s]*results/[\w.-]+)\)", prose)
            rows = [(path.parent / link).with_suffix(".jsonl") for link in links]
            assert rows and all(file.is_file() for file in rows), f"{title}: link the rows of the table"
            assert re.search(r"(scripts|training)/[\w/]+\.(py|sh)", section), f"{title}: name the command"


def test_the_check_of_tables_recognises_measured_numbers():
    assert is_measured(["0.33 → 0.65", "0.39 → 0.33"]) and is_measured(["6,807", "8,652", "0.1"])
    assert not is_measured(["a folder", "0.2, 0.2"]) and not is_measured(["2 N", "18", "see below"])


def test_the_soak_test_starts_as_documented():
    """It runs outside pytest, which puts tests/support on the path."""
    completed = subprocess.run([sys.executable, ROOT / "tests" / "soak.py", "--help"], capture_output=True, text=True)
    assert completed.returncode == 0 and "--kills" in completed.stdout, completed.stderr
