"""CITATION.cff: the fields that Citation File Format 1.2.0 requires, and values that agree with the package."""

import yaml
from repository import ROOT

import dschat

# Of the schema of version 1.2.0: https://github.com/citation-file-format/citation-file-format
KEYS = {
    "abstract", "authors", "cff-version", "commit", "contact", "date-released", "doi", "identifiers", "keywords",
    "license", "license-url", "message", "preferred-citation", "references", "repository", "repository-artifact",
    "repository-code", "title", "type", "url", "version",
}  # fmt: skip


def test_the_citation_is_complete_and_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() <= KEYS
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["version"] == dschat.__version__
    assert citation["authors"] == [{"name": "The dschat authors"}]  # an entity
    assert f'license="{citation["license"]}"' in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
