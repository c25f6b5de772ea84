"""Load a checkpoint's manifest.json as untrusted input, and compare it with the files of the folder."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from dschat.arguments.strict_json import parse_json

NAME = "manifest.json"
_LARGEST = 256 << 20  # bytes; a manifest of 100,000 files has a tenth of that


def read_manifest(folder: Path) -> dict[str, Any]:
    """Load and validate the manifest: types of the entries, and file names inside the folder.

    Raises: ValueError with a message of one line.
    """
    path = folder / NAME
    try:
        if path.is_symlink() or path.stat().st_size > _LARGEST:
            raise ValueError("it is a link, or too large")
        manifest = parse_json(path.read_bytes(), constants=True)
        if not isinstance(manifest, dict):
            raise ValueError("it is not a JSON object")
        missing = [name for name in ("files", "world_size", "step") if name not in manifest]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
    except (OSError, ValueError) as error:
        raise ValueError(f"{NAME} cannot be read ({error})") from error
    problems = _entry_problems(manifest)
    if problems:
        raise ValueError(f"{NAME} cannot be used: {'; '.join(problems[:3])}")
    return manifest


def _entry_problems(manifest: dict[str, Any]) -> list[str]:
    problems = []
    for name, lowest in {"world_size": 1, "step": 0}.items():
        if type(manifest[name]) is not int or not lowest <= manifest[name] < 2**53:
            problems.append(f"{name} must be an integer of at least {lowest}")
    for name in ("files", "zero_stages", "arguments"):
        if not isinstance(manifest.get(name, {}), dict):
            problems.append(f"{name} must be an object")
    if problems:
        return problems
    if any(type(stage) is not int for stage in manifest.get("zero_stages", {}).values()):
        problems.append("a ZeRO stage must be an integer")
    for name, entry in manifest["files"].items():
        if not _is_inside_folder(name):
            problems.append(f"{name[:200]!r} is not the name of a file in the folder")
        elif not _is_size_and_digest(entry):
            problems.append(f"the entry of {name[:200]!r} must be its size and SHA-256")
    return problems


def _is_inside_folder(name: str) -> bool:
    """Whether a name is a normalised relative path inside the folder, as `digests` writes it."""
    path = PurePosixPath(name)
    is_normal = name.isprintable() and "\\" not in name and name == path.as_posix()
    return is_normal and not path.is_absolute() and ".." not in path.parts and name not in ("", ".", NAME)


def _is_size_and_digest(entry: Any) -> bool:
    return (
        isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int and entry[0] >= 0
        and isinstance(entry[1], str) and re.fullmatch("[0-9a-f]{64}", entry[1]) is not None
    )  # fmt: skip


def unlisted_files(folder: Path, files: dict[str, Any]) -> list[str]:
    """A line for everything in a checkpoint folder that is not in its manifest: files, links, pipes."""
    problems = []
    for parent, folders, names in os.walk(folder, onerror=lambda error: problems.append(str(error))):
        for name in sorted([*folders, *names]):
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink():
                problems.append(f"{relative} is a link")
            elif not path.is_dir() and relative != NAME and relative not in files:
                problems.append(f"{relative} is not in the manifest")
    return problems
