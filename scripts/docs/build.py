"""Build the documentation site from the READMEs, the pages beside this file, the flags and the docstrings.

    bin=$(bash scripts/install.sh docs) && "$bin/python" scripts/docs/build.py

writes HTML to output/docs; open index.html there (its search needs a web server, such as `python -m http.server`). No
network is needed. A warning, such as a link that leads nowhere, is an error.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from dschat.arguments.script_inputs import exit_on_mistake

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = ("mkdocs", "material", "mkdocstrings", "latex2mathml")  # the extra `docs` of setup.py
MARK = ".made-by-build.py"  # mkdocs empties the folder of a site, but keeps hidden files


def build(site: Path) -> None:
    """Assemble the pages in a temporary folder and run mkdocs on them.

    Raises:
        ValueError: a package is missing, a link of a page is wrong, or `site` has files of something else.
        subprocess.CalledProcessError: mkdocs fails or warns; it has printed why.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)}: not installed: bash scripts/install.sh docs")
    from api_pages import write_api_pages
    from flag_reference import write_flag_pages
    from site_pages import write_pages

    mark = site / MARK
    if site.exists() and any(site.iterdir()) and not mark.is_file():
        raise ValueError(f"--output {site}: is not a site that this script has built; its files would be deleted")
    with tempfile.TemporaryDirectory(prefix="dschat-docs-") as name:
        folder = Path(name)
        for write in (write_pages, write_flag_pages, write_api_pages):
            write(folder / "pages")
        settings = {
            "INHERIT": str(HERE / "mkdocs.yml"),
            "docs_dir": str(folder / "pages"),
            "plugins": {"mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)]}}}},
        }
        config = folder / "mkdocs.yml"
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
        subprocess.run(command, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    mark.touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "docs", help="folder of the site")
    site = parser.parse_args().output.resolve()
    try:
        with exit_on_mistake("build"):
            build(site)
    except subprocess.CalledProcessError as failure:
        raise SystemExit(failure.returncode) from None
    print(site / "index.html")


if __name__ == "__main__":
    main()
