"""Where rows come from: files, folders of files, `save_to_disk` folders, hub names and generated tasks, with weights
and splits.

Hub names are read through the Hugging Face cache of the user, so that what was downloaded before works offline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from .files import SUFFIXES, SourceRow, file_rows
from .reasoning import PREFIX, ReasoningTask, reasoning_task

EVAL_NAMES = ("eval", "evaluation", "validation", "valid", "val", "dev", "test")  # the first that is there is used
_NOT_ROWS = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}


@dataclass(frozen=True)
class Source:
    """One entry of --data_path. `splits` maps "train" and perhaps "eval" to files, data sets or a generated task."""

    name: str
    splits: Mapping[str, Sequence[Path | Dataset | ReasoningTask]]

    def rows(self, split: str) -> Iterator[SourceRow]:
        """All rows of the split, in a fixed order.

        Raises:
            ValueError: a file is empty or cannot be read at all.
        """
        for part in self.splits[split]:
            if isinstance(part, Path):
                yield from file_rows(part)
            elif isinstance(part, ReasoningTask):
                yield from part.rows()
            else:
                yield from _table_rows(part, f"{self.name}[{split}]")

    def identity(self) -> list[list[str | int]]:
        """Changes when the rows may have changed: name, size and time of files, fingerprint of data sets."""
        parts = [(split, part) for split in sorted(self.splits) for part in self.splits[split]]
        return [[split, *self._identity_of(part)] for split, part in parts]

    def _identity_of(self, part: Path | Dataset | ReasoningTask) -> list[str | int]:
        if isinstance(part, Path):
            return [str(part), part.stat().st_size, part.stat().st_mtime_ns]
        if isinstance(part, ReasoningTask):
            return part.identity()
        return [self.name, len(part), part._fingerprint]


def parse_data_path(entries: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """["a:0.7", "b:0.3"] → (["a", "b"], [0.7, 0.3]); without weights (["a", "b"], None).

    Raises:
        ValueError: no entry, a weight that is not positive, or weights on some entries only.
    """
    paths: list[str] = []
    weights: list[float | None] = []
    for entry in entries:
        path, colon, weight = entry.rpartition(":")
        if not colon or Path(entry).exists() or not re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", weight):
            path, weight = entry, ""
        paths.append(path)
        weights.append(float(weight) if weight else None)
    if not paths:
        raise ValueError("--data_path is empty: name at least one file, folder or hub data set.")
    if any(weight is not None and weight <= 0 for weight in weights):
        raise ValueError(f"--data_path {' '.join(entries)}: a weight must be positive.")
    if len({weight is None for weight in weights}) == 2:
        raise ValueError(f"--data_path {' '.join(entries)}: give every source a weight, or none.")
    return paths, None if weights[0] is None else [weight for weight in weights if weight is not None]


def load_source(path: str, *, for_eval: bool = False) -> Source:
    """Find out what the path is and which splits it has: always "train", and "eval" if it brings its own.

    A single file is "train", whatever its name. In folders and data sets the names of files, sub-folders and splits
    are read ("test/part-0.jsonl"); what names no split is "train".

    Args:
        for_eval: this is an entry of --eval_data_path: evaluation rows alone are enough.

    Raises:
        ValueError: nothing there, an empty file, a suffix that is not known, a folder without data or train rows.
    """
    if path.startswith(PREFIX):
        return Source(path, {"train": [reasoning_task(path)]})
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix not in SUFFIXES:
            raise ValueError(f"{path}: the suffix {place.suffix!r} is not known; use one of {', '.join(SUFFIXES)}.")
        if place.stat().st_size == 0:
            raise ValueError(f"{path} is empty (0 bytes): it must hold at least one row.")
        return Source(path, {"train": [place]})
    if not place.is_dir():
        return _hub_source(path, for_eval)
    if (place / "dataset_dict.json").exists() or (place / "state.json").exists():
        return _table_source(path, load_from_disk(str(place)), for_eval)
    named: dict[str, list[Path]] = {}
    for file in sorted(place.rglob("*")):
        inside = file.relative_to(place)
        hidden = any(part.startswith((".", "_")) for part in inside.parts)
        if file.is_file() and file.suffix in SUFFIXES and file.name not in _NOT_ROWS and not hidden:
            named.setdefault(_split_name(str(inside.with_suffix(""))), []).append(file)
    if not named:
        raise ValueError(f"{path}: no data file in this folder; it needs files that end with {', '.join(SUFFIXES)}.")
    return _with_splits(path, named, for_eval)


def _hub_source(path: str, for_eval: bool) -> Source:
    looks_like_path = path.startswith((".", "/", "~")) or path.endswith(SUFFIXES) or path.count("/") > 1
    if looks_like_path:
        raise ValueError(f"--data_path {path}: there is no such file or folder; check the spelling.")
    try:
        return _table_source(path, load_dataset(path), for_eval)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"--data_path {path}: there is no such file or folder, and as a name on the hub it could not be loaded "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}). Check the "
            "spelling; without network, bring the data as a local file or `save_to_disk` folder."
        ) from error


def _table_source(path: str, table: Dataset | DatasetDict, for_eval: bool) -> Source:
    if isinstance(table, Dataset):
        return Source(path, {"train": [table]})
    named: dict[str, list[Dataset]] = {}
    for split in table:
        named.setdefault(_split_name(split), []).append(table[split])
    if "train" in table:  # "train" next to "train_sft" means itself
        named["train"] = [table["train"]]
    if len(named.get("train", [])) > 1:
        raise ValueError(
            f"{path} has several train splits ({', '.join(table)}): save the one you want with save_to_disk or "
            "to_json, and name that folder or file."
        )
    return _with_splits(path, named, for_eval)


def _split_name(name: str) -> str:
    """The split that a file or split name speaks of, word by word: "test/part-0" → "test"; "train" where none."""
    words = re.split(r"[^a-z]+", name.lower())
    if "train" in words:
        return "train"
    return next((word for word in EVAL_NAMES if word in words), "train")


def _with_splits(path: str, named: Mapping[str, Sequence[Path | Dataset]], for_eval: bool) -> Source:
    own_eval = next((named[name] for name in EVAL_NAMES if name in named), None)
    splits = {**({"train": named["train"]} if "train" in named else {}), **({"eval": own_eval} if own_eval else {})}
    if "train" not in splits and not for_eval:
        raise ValueError(
            f"{path}: only evaluation data here ({', '.join(named)}), no train rows. Give it as --eval_data_path, or "
            "name the wanted file itself."
        )
    return Source(path, splits)


def _table_rows(table: Dataset, name: str) -> Iterator[SourceRow]:
    for number, row in enumerate(table):
        yield SourceRow(row, f"{name}:row {number}", "")
