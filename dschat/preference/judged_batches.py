"""Resumable storage of preference pairs: judged batches are appended to part files, merged into one file at the end.

OUTPUT_DIR/preferences.part/         while the run is unfinished
    settings.json                    settings that determine the pairs
    rank-00000.jsonl, …              one line per batch, one file per rank, fsynced after each batch
OUTPUT_DIR/preferences.jsonl         once every batch is judged, by an atomic rename
OUTPUT_DIR/preferences.settings.json settings of the finished file, by which --resume auto recognises it
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.arguments.strict_json import read_json_object
from dschat.checkpoints.verified_folder import sync
from dschat.distributed import collectives, failpoint

FINAL, PART, SETTINGS = "preferences.jsonl", "preferences.part", "preferences.settings.json"


@dataclass(frozen=True)
class JudgedBatch:
    """The pairs made from one batch of prompts.

    Attributes:
        indices: indices of its prompts in the data.
        pairs: (index of the prompt, row of the preference file), in the order of `indices`.
        scored, unscored: number of responses with and without a score.
    """

    indices: list[int]
    pairs: list[tuple[int, dict[str, Any]]]
    scored: int
    unscored: int


class JudgedBatches:
    """This rank's part file, and the batches of all ranks that were judged before the run was resumed.

    Attributes:
        earlier: batches judged before the run was resumed, of all ranks; each prompt is in at most one of them.
        finished: True if OUTPUT_DIR/preferences.jsonl exists and was made with the same settings.
    """

    def __init__(self, output_dir: str | Path, settings: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Start or resume. A collective.

        Args:
            settings: settings that determine the pairs, JSON-serialisable.
            resume: continue from existing part files; without it they are moved aside.
            overwrite: a finished preferences.jsonl may be replaced (at the end, when the new one is complete).

        Raises: ValueError on every rank if a finished file may not be replaced, or existing files have other settings.
        """
        self.folder = Path(output_dir)
        self.path = self.folder / PART / f"rank-{collectives.rank():05d}.jsonl"
        self.finished, problem = False, None
        if collectives.is_main():
            try:
                self.finished = self._start_or_resume(dict(settings), resume=resume, overwrite=overwrite)
            except ValueError as error:
                problem = str(error)
            except OSError as error:
                problem = f"--output_dir {output_dir}: cannot be written ({error})"
        problem, self.finished = collectives.all_gather_objects((problem, self.finished))[0]
        if problem:
            raise ValueError(problem)
        # Nodes may have separate disks: one process of each node reads its part files.
        on_disk = [] if self.finished or not collectives.is_main_of_node() else read_parts(self.folder / PART)
        self.earlier = without_duplicates(collectives.all_gather_lists(on_disk))

    def append(self, batch: JudgedBatch) -> None:
        """Append a batch and fsync it. Raises OSError if that fails."""
        self.path.parent.mkdir(exist_ok=True)
        is_new = not self.path.exists()
        with self.path.open("ab", buffering=0) as file:
            size = file.tell()
            after_truncated_line = size and _last_byte(self.path) != b"\n"  # the process was killed while writing
            line = b"\n" * after_truncated_line + _encode_line(batch)
            try:
                failpoint.reached("judging")
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError as error:
                file.truncate(size)
                raise OSError(error.errno, error.strerror, str(self.path)) from error
        if is_new:
            sync(self.path.parent)
        failpoint.reached("judged")

    def finish(self, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write the final file, then remove the parts; main rank only. On OSError the parts are kept."""
        final, temporary = self.folder / FINAL, self.folder / f".{FINAL}.tmp"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())
            failpoint.reached("pairs_written")
            temporary.rename(final)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        failpoint.reached("pairs_renamed")  # if killed here, resuming rebuilds the same file from the parts
        (self.folder / PART / "settings.json").replace(self.folder / SETTINGS)
        shutil.rmtree(self.folder / PART)
        sync(self.folder)
        return final

    def _start_or_resume(self, settings: dict[str, Any], *, resume: bool, overwrite: bool) -> bool:
        """Return whether the run is already finished; otherwise prepare the part folder."""
        final, part = self.folder / FINAL, self.folder / PART
        if resume and (part / "settings.json").is_file():
            _require_same_settings(part / "settings.json", settings)
            return False
        if resume and final.exists() and not overwrite:
            _require_same_settings(self.folder / SETTINGS, settings)
            return True
        if final.exists() and not overwrite:
            raise ValueError(already_exists_message(final))
        if part.exists():
            backup = next(path for n in range(1, 10**6) if not (path := self.folder / f"{PART}-before-{n}").exists())
            part.rename(backup)
            print(f"this run starts from the beginning: earlier judged batches were moved to {backup}", flush=True)
        part.mkdir(parents=True)
        temporary = part / ".settings.json.tmp"
        temporary.write_text(json.dumps(settings, indent=1), encoding="utf-8")
        temporary.rename(part / "settings.json")
        sync(self.folder)
        return False


def already_exists_message(final: Path) -> str:
    """The error message for a finished file when --overwrite is not given."""
    return f"{final} already exists: name another --output_dir, or pass --overwrite"


def read_parts(folder: Path) -> list[JudgedBatch]:
    """The batches of all part files; truncated or damaged lines are skipped, so those batches are judged again."""
    batches = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            batch = _parse_line(line)
            if batch is not None:
                batches.append(batch)
            elif line:
                print(f"{path}:{number} is incomplete: its prompts are judged again", flush=True)
    return batches


def without_duplicates(batches: Sequence[JudgedBatch]) -> list[JudgedBatch]:
    """Drop batches with prompts of an earlier batch: nodes with a shared disk read the same part files."""
    indices: set[int] = set()
    unique = []
    for batch in batches:
        if indices.isdisjoint(batch.indices):
            indices.update(batch.indices)
            unique.append(batch)
    return unique


def remaining_batches(prompts: int, *, batch_size: int, earlier: Iterable[JudgedBatch]) -> list[list[int]]:
    """Batches of indices of the remaining prompts.

    Batch boundaries depend neither on the finished batches nor on the number of processes, so that a resumed run has
    the same batches as an uninterrupted one.
    """
    done = {index for batch in earlier for index in batch.indices}
    batches = [range(start, min(start + batch_size, prompts)) for start in range(0, prompts, batch_size)]
    remaining = [[index for index in batch if index not in done] for batch in batches]
    return [batch for batch in remaining if batch]


def _encode_line(batch: JudgedBatch) -> bytes:
    content = json.dumps(vars(batch), ensure_ascii=False)
    return json.dumps({"crc32": zlib.crc32(content.encode()), "batch": content}, ensure_ascii=False).encode() + b"\n"


def _parse_line(line: bytes) -> JudgedBatch | None:
    try:
        entry = json.loads(line)
        if zlib.crc32(entry["batch"].encode()) != entry["crc32"]:
            return None
        batch = json.loads(entry["batch"])
        return JudgedBatch(**batch | {"pairs": [(index, row) for index, row in batch["pairs"]]})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _require_same_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ValueError naming the settings that differ."""
    try:
        before = read_json_object(path, constants=True)
        changed = [f"{name} was {before.get(name)} and is {now}" for name, now in settings.items()
                   if before.get(name) != now]  # fmt: skip
    except (OSError, ValueError, AttributeError) as error:
        changed = [f"{path} cannot be read ({error})"]
    if changed:
        raise ValueError(
            f"--resume auto: {path.parent} holds pairs made with other settings: {'; '.join(changed)}. Use "
            "the same ones, name another --output_dir, or start again with --resume never (and --overwrite)"
        )


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()
