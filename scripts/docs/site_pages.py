"""Pages of the site that are files of the repository, with their links rewritten to where they are on the site."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from formulas import with_mathml

ROOT = Path(__file__).resolve().parents[2]
PAGES_FOLDER = ROOT / "scripts" / "docs" / "pages"
# File of the repository → page. The files of pages/ are pages of the same name.
PAGES = {
    "README.md": "index.md",
    "training/step1_supervised_finetuning/README.md": "steps/sft.md",
    "training/step2_reward_model_finetuning/README.md": "steps/reward_model.md",
    "training/step2_dpo_finetuning/README.md": "steps/dpo.md",
    "training/step3_rlhf_finetuning/README.md": "steps/rlhf.md",
    "scripts/benchmark/README.md": "benchmarks/index.md",
    "scripts/benchmark/results/cpu-2-cores.md": "benchmarks/cpu-2-cores.md",
    "scripts/benchmark/results/training-cpu-2-cores.md": "benchmarks/training-cpu-2-cores.md",
    "scripts/benchmark/results/vllm-cpu-2-cores.md": "benchmarks/vllm-cpu-2-cores.md",
    "scripts/benchmark/results/first-minutes-cpu-2-cores.md": "benchmarks/first-minutes-cpu-2-cores.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
} | {
    str(path.relative_to(ROOT)): str(path.relative_to(PAGES_FOLDER)) for path in sorted(PAGES_FOLDER.rglob("*.md"))
}
FILES = "files"  # folder of the site for other files that pages link to

_FENCE = re.compile(r"^( *)(```+).*?^\1\2`*[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


def write_pages(folder: Path) -> None:
    """Write all pages into docs_dir, and copy the files that they link to.

    Raises:
        ValueError: a link leads to nothing, to a folder, or to a Markdown file that is not in PAGES.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "scripts" / "docs" / "site.css", folder)
    for source, page in PAGES.items():
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / source).read_text(encoding="utf-8")
        path.write_text(with_mathml(with_site_links(text, source, folder=folder)), encoding="utf-8")


def with_site_links(text: str, source: str, *, folder: Path) -> str:
    """The text with relative links rewritten, but in fenced code; see write_pages.

    Args:
        source: file of the text, relative to the repository's root.
    """
    pieces, end = [], 0
    for fence in _FENCE.finditer(text):
        pieces += [_rewritten(text[end : fence.start()], source, folder), fence[0]]
        end = fence.end()
    return "".join([*pieces, _rewritten(text[end:], source, folder)])


def _rewritten(text: str, source: str, folder: Path) -> str:
    return _LINK.sub(lambda match: _site_link(match[1], source, folder), text)


def _site_link(link: str, source: str, folder: Path) -> str:
    file, hash_sign, anchor = link.partition("#")
    if "://" in link or not file:
        return link
    target = os.path.normpath(os.path.join(os.path.dirname(source), file))
    page = PAGES.get(target)
    if page is None:
        page = f"{FILES}/{target}"
        _copy(link, source, ROOT / target, folder / page)
    return os.path.relpath(page, os.path.dirname(PAGES[source]) or ".") + hash_sign + anchor


def _copy(link: str, source: str, file: Path, destination: Path) -> None:
    if not file.is_file():
        raise ValueError(f"{source}: the link {link} is not to a file; correct it")
    if file.suffix == ".md":
        raise ValueError(f"{source}: the link {link} is to a file without a page: add it to PAGES and to mkdocs.yml")
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, destination)
