"""The documentation site: its pages are complete, its links hold, and it loads nothing from the network."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from repository import ROOT, SCRIPTS

from dschat import arguments
from dschat.arguments.command_line import SuiteParser, group_types
from dschat.losses import POLICY_LOSSES
from dschat.rlhf.algorithms import ALGORITHMS

PACKAGES = ("mkdocs", "material", "mkdocstrings", "latex2mathml")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
needs_mkdocs = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: bash scripts/install.sh docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as the documented command builds it; a warning of mkdocs fails the build."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, SCRIPTS / "docs" / "build.py", "--output", folder], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class References(HTMLParser):
    """Addresses that a page loads (scripts, styles, images), and those that it links to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.math = 0
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids |= {values["id"]} if values.get("id") else set()
        self.math += tag == "math"
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") == "stylesheet":
            self.loaded.append(values["href"])
        elif tag in ("script", "img", "iframe") and values.get("src"):
            self.loaded.append(values["src"])


@needs_mkdocs
def test_every_link_of_the_site_leads_to_a_file_and_a_heading(site):
    pages = {page: References(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 25
    missing = []
    for page, references in pages.items():
        for link in {*references.links, *references.loaded}:
            file, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", file):
                continue
            target = (page.parent / file).resolve() if file else page
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].ids):
                missing.append(f"{page.name}: {link}")
    assert missing == []


@needs_mkdocs
def test_nothing_is_loaded_from_the_network(site):
    for page in site.rglob("*.html"):
        assert not [address for address in References(page).loaded if "//" in address], page
    for style in site.rglob("*.css"):
        addresses = re.findall(r"(?:url\(|@import\s)[\"']?(https?:)?//", style.read_text(encoding="utf-8"))
        assert addresses == [], style


@needs_mkdocs
def test_formulas_are_mathml_and_no_latex_remains(site):
    formulas = (SCRIPTS / "docs" / "pages" / "algorithms.md").read_text(encoding="utf-8").count("```math")
    page = site / "algorithms.html"
    assert References(page).math == formulas > 20
    assert "\\frac" not in page.read_text(encoding="utf-8")


@needs_mkdocs
@pytest.mark.parametrize(
    ("name", "settings"),
    [("sft", arguments.SFTSettings), ("reward_model", arguments.RewardModelSettings),
     ("dpo", arguments.PreferenceSettings), ("make_preferences", arguments.PairSettings),
     ("rlhf", arguments.RLHFSettings)],
)  # fmt: skip
def test_the_flag_reference_of_a_program_has_exactly_its_flags(site, name, settings):
    page = (site / "flags" / f"{name}.html").read_text(encoding="utf-8")
    first_cells = re.findall(r"<tr>\s*<td><code>--(\w+)</code></td>", page)
    parsed = SuiteParser(tuple(group_types(settings).values())).flags().keys() - {"help"}
    aliases = {name for name in parsed if "-" in name or (name.startswith("no_") and name[3:] in parsed)}
    assert sorted(first_cells) == sorted(parsed - aliases)


@needs_mkdocs
def test_the_flag_reference_states_choices_bounds_and_defaults(site):
    text = re.sub(r"<[^>]+>", "", (site / "flags" / "rlhf.html").read_text(encoding="utf-8"))
    row = re.search(r"--actor_zero_stage\n(.*)\n(.*)\n", text)
    assert (row[1], row[2]) == ("0, 1, 2, 3", "2")
    row = re.search(r"--gae_lambda\n(.*)\n(.*)\n(.*)\n", text)
    assert (row[1], row[2]) == ("number, ≥ 0, ≤ 1", "0.95") and "Only with --algorithm ppo" in row[3]


@needs_mkdocs
def test_a_folder_with_other_files_is_not_emptied(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    done = subprocess.run(
        [sys.executable, SCRIPTS / "docs" / "build.py", "--output", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 2 and f"--output {tmp_path}" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_every_algorithm_and_loss_has_its_formula():
    text = (SCRIPTS / "docs" / "pages" / "algorithms.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    preference_losses = arguments.PreferenceArguments.__annotations__["preference_loss"].__args__
    assert headings == {*ALGORITHMS, *POLICY_LOSSES, *preference_losses}


def test_tutorials_are_short_and_in_the_navigation():
    navigation = (SCRIPTS / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    tutorials = sorted((SCRIPTS / "docs" / "pages" / "tutorials").glob("*.md"))
    assert len(tutorials) >= 7
    for page in tutorials:
        assert f"tutorials/{page.name}" in navigation
        assert len(page.read_text(encoding="utf-8").splitlines()) <= 80, page
        assert re.search(r"minutes", page.read_text(encoding="utf-8")), f"{page} does not say how long it takes"


def test_pages_of_the_navigation_are_files_of_the_repository_or_generated():
    navigation = set(re.findall(r": ([\w/-]+\.md)$", (SCRIPTS / "docs" / "mkdocs.yml").read_text(), re.MULTILINE))
    source = (SCRIPTS / "docs" / "site_pages.py").read_text(encoding="utf-8")
    for page in navigation:
        generated = page.startswith(("flags/", "api/"))
        assert generated or f'"{page}"' in source or (SCRIPTS / "docs" / "pages" / page).is_file(), page
    for name in re.findall(r'^    "([\w./-]+\.md)": ', source, re.MULTILINE):
        assert (ROOT / name).is_file(), name
