"""Data sources: files, folders of files, `save_to_disk` folders, hub names, generated tasks; weights and splits.

Hub names are loaded through the user's Hugging Face cache, so that downloaded datasets work offline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from dschat.arguments.strict_json import read_json_object

from .files import SUFFIXES, SourceRow, file_rows
from .hub_datasets import HubDataset, UnusableRow, hub_dataset, mapped_fields
from .reasoning_gym import PREFIX, ReasoningTask, reasoning_task

EVAL_NAMES = ("eval", "evaluation", "validation", "valid", "val", "dev", "test")  # in order of preference
_LARGEST_WEIGHT = 1e9
_METADATA_FILES = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}


@dataclass(frozen=True)
class Source:
    """One entry of --data_path.

    Args:
        splits: "train" and optionally "eval" → files, datasets or a generated task.
        dataset: the supported hub dataset (see hub_datasets) that the rows belong to, if any.
        columns: field of records.py → the user's column for it.
    """

    name: str
    splits: Mapping[str, Sequence[Path | Dataset | ReasoningTask]]
    dataset: HubDataset | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    def rows(self, split: str) -> Iterator[SourceRow]:
        """All rows of the split, mapped to the fields of records.py, in a fixed order.

        Raises:
            ValueError: a file is empty or cannot be read at all.
        """
        for part in self.splits[split]:
            for row in self._rows_of(part, split):
                yield row if row.fields is None else self._mapped(row)

    def identity(self) -> list[list[Any]]:
        """Changes when rows may have changed: name, size, mtime of files; dataset fingerprints; mapping."""
        parts = [(split, part) for split in sorted(self.splits) for part in self.splits[split]]
        mapping = ["mapping", "" if self.dataset is None else self.name, sorted(self.columns.items())]
        return [*([split, *self._identity_of(part)] for split, part in parts), mapping]

    def _rows_of(self, part: Path | Dataset | ReasoningTask, split: str) -> Iterator[SourceRow]:
        if isinstance(part, Path):
            return file_rows(part)
        return part.rows() if isinstance(part, ReasoningTask) else _table_rows(part, f"{self.name}[{split}]")

    def _mapped(self, row: SourceRow) -> SourceRow:
        try:
            return row._replace(fields=mapped_fields(row.fields, self.dataset, self.columns))
        except UnusableRow as reason:
            return SourceRow(None, row.where, "", dropped=str(reason))
        except ValueError as error:
            return SourceRow(None, row.where, str(error))

    def _identity_of(self, part: Path | Dataset | ReasoningTask) -> list[str | int]:
        if isinstance(part, Path):
            return [str(part), part.stat().st_size, part.stat().st_mtime_ns]
        if isinstance(part, ReasoningTask):
            return part.identity()
        return [self.name, len(part), part._fingerprint]


def parse_data_path(entries: Sequence[str], *, flag: str = "--data_path") -> tuple[list[str], list[float] | None]:
    """["a:0.7", "b:0.3"] → (["a", "b"], [0.7, 0.3]); without weights (["a", "b"], None).

    Raises:
        ValueError: no entry, one without a path, a weight that is not positive, or weights on some entries only.
    """
    paths: list[str] = []
    weights: list[float | None] = []
    for entry in entries:
        path, colon, weight = entry.rpartition(":")
        if not colon or Path(entry).exists() or not re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", weight):
            path, weight = entry, ""
        if not path.strip():
            raise ValueError(f"{flag} {entry!r}: has an empty path; name a file, folder or hub data set.")
        paths.append(path)
        weights.append(_weight(weight, entry, flag) if weight else None)
    if not paths:
        raise ValueError(f"{flag} is empty: name at least one file, folder or hub data set.")
    if len({weight is None for weight in weights}) == 2:
        raise ValueError(f"{flag} {' '.join(entries)}: give every source a weight, or none.")
    return paths, None if weights[0] is None else [weight for weight in weights if weight is not None]


def _weight(text: str, entry: str, flag: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= _LARGEST_WEIGHT:
        raise ValueError(f"{flag} {entry}: the weight {text} must be positive, and at most {_LARGEST_WEIGHT:g}.")
    return weight


def load_source(path: str, *, for_eval: bool = False, columns: Mapping[str, str] | None = None) -> Source:
    """Resolve a path and its splits: always "train", and "eval" if it provides one.

    A single file is "train", whatever its name. In folders and data sets the names of files, sub-folders and splits
    determine the split ("test/part-0.jsonl"); names without a split are "train". Datasets in hub_datasets.py define
    their own splits.

    Args:
        for_eval: an entry of --eval_data_path, for which an "eval" split alone is enough.
        columns: field of records.py → the user's column for it.

    Raises:
        ValueError: missing path, empty file, unsupported suffix, or a folder without data or train rows.
    """
    if path.startswith(PREFIX):
        return Source(path, {"train": [reasoning_task(path)]}, columns=columns or {})
    dataset, target = hub_dataset(path)
    if not target.strip():
        raise ValueError(f"--data_path {path!r}: no file or folder is named; write its path.")
    folder = Path(target).expanduser()
    if folder.is_file():
        source = _file_source(target, folder)
    elif folder.is_dir():
        source = _folder_source(target, folder, dataset, for_eval)
    elif target != path:
        raise ValueError(f"--data_path {path}: there is no file or folder {target}; write NAME=PATH or only the name.")
    else:
        source = _hub_source(path, dataset, for_eval)
    return replace(source, name=path, dataset=dataset, columns=columns or {})


def _file_source(path: str, file: Path) -> Source:
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{path}: the suffix {file.suffix!r} is not supported; use one of {', '.join(SUFFIXES)}.")
    if file.stat().st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes): it must hold at least one row.")
    return Source(path, {"train": [file]})


def _folder_source(path: str, folder: Path, dataset: HubDataset | None, for_eval: bool) -> Source:
    if _is_saved_table(folder):
        return _table_source(path, _saved_table(path, folder), dataset, for_eval)
    if dataset is not None and dataset.config and (folder / dataset.config).is_dir():
        folder = folder / dataset.config  # on the hub, each configuration has its own folder
    files = [file for file in sorted(folder.rglob("*")) if _is_data(file, folder)]
    names = _split_names([str(file.relative_to(folder).with_suffix("")) for file in files], dataset)
    named: dict[str, list[Path]] = {}
    for name, file in zip(names, files, strict=True):
        named.setdefault(name, []).append(file)
    if not named:
        raise ValueError(f"{path}: no data file in this folder; it needs files that end with {', '.join(SUFFIXES)}.")
    return _with_splits(path, named, for_eval)


def _is_saved_table(folder: Path) -> bool:
    """Whether save_to_disk wrote the folder; other programs write a state.json too."""
    files = [(folder / name).is_file() for name in ("state.json", "dataset_info.json")]
    return (folder / "dataset_dict.json").is_file() or all(files) or (any(files) and any(folder.glob("*.arrow")))


def _saved_table(path: str, folder: Path) -> Dataset | DatasetDict:
    """Load a `save_to_disk` folder. Raises ValueError with the path if it is damaged, or has no rows."""
    try:
        tables = [folder]
        if (folder / "dataset_dict.json").is_file():
            splits = read_json_object(folder / "dataset_dict.json").get("splits")
            if not isinstance(splits, list) or not splits or not all(isinstance(name, str) for name in splits):
                raise ValueError(f"{folder / 'dataset_dict.json'}: names no splits")
            tables = [folder / name for name in splits]
        for table in tables:
            read_json_object(table / "dataset_info.json", constants=True)
            state = read_json_object(table / "state.json", constants=True)
            if state.get("_data_files") == []:
                raise ValueError(f"{table} has no rows")
        return load_from_disk(str(folder))
    except Exception as error:  # of datasets and Arrow, whose errors have many types
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{path}: not a readable `save_to_disk` folder ({reason or type(error).__name__}); save it again."
        ) from error


def _is_data(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
    return file.is_file() and file.suffix in SUFFIXES and file.name not in _METADATA_FILES and not hidden


def _hub_source(path: str, dataset: HubDataset | None, for_eval: bool) -> Source:
    looks_like_path = path.startswith((".", "/", "~")) or path.endswith(SUFFIXES) or path.count("/") > 1
    if looks_like_path:
        raise ValueError(f"--data_path {path}: there is no such file or folder; check the spelling.")
    name, config = (path, None) if dataset is None else (dataset.hub or path, dataset.config)
    try:
        table = load_dataset(name, config)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"--data_path {path}: there is no such file or folder, and as a name on the hub it could not be loaded "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}). Check the "
            "spelling; without network, provide the data as a local file or `save_to_disk` folder."
        ) from error
    return _table_source(path, table, dataset, for_eval)


def _table_source(path: str, table: Dataset | DatasetDict, dataset: HubDataset | None, for_eval: bool) -> Source:
    if isinstance(table, Dataset):
        return Source(path, {"train": [table]})
    named: dict[str, list[Dataset]] = {}
    for name, split in zip(_split_names(list(table), dataset), table, strict=True):
        named.setdefault(name, []).append(table[split])
    if "train" in table:  # "train" takes precedence over "train_sft"
        named["train"] = [table["train"]]
    if len(named.get("train", [])) > 1:
        raise ValueError(
            f"{path} has several train splits ({', '.join(table)}): save the one you want with save_to_disk or "
            "to_json, and name that folder or file."
        )
    return _with_splits(path, named, for_eval)


def _split_names(names: Sequence[str], dataset: HubDataset | None) -> list[str]:
    """Map each file or split name to the split among its words: "test/part-0" → "test"; default "train".

    For a supported dataset with its own splits, names that match none of them are "unused".
    """
    own = {} if dataset is None else dataset.splits
    if any(split in name for split in own.values() for name in names):
        return [next((split_name for split_name, split in own.items() if split in name), "unused") for name in names]
    words = [re.split(r"[^a-z]+", name.lower()) for name in names]
    return ["train" if "train" in w else next((x for x in EVAL_NAMES if x in w), "train") for w in words]


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
    rows, number = iter(table), 0
    while True:
        try:
            row = next(rows, None)
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # a text may be invalid UTF-8
            raise ValueError(f"{name}:row {number}: not readable ({error}); save the data set again.") from error
        if row is None:
            return
        yield SourceRow(row, f"{name}:row {number}", "")
        number += 1
