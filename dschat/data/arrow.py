"""On-disk cache of encoded sources: each is written once as memory-mapped Arrow and reused by later runs.

The folder `<kind>-<fingerprint>` holds train.arrow, eval.arrow, report.json and their manifest. The fingerprint covers
the source's files, the settings that affect a row, and the tokenizer: anything that changes a row creates a new folder,
while new mixing weights or other sources do not. A folder that does not match its manifest is rebuilt (see
checkpoints.verified_folder). Rows are streamed, so the data may be larger than memory.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedTokenizerBase

from dschat.checkpoints.verified_folder import folder_problems, written_folder
from dschat.distributed import watchdog

from .encoding import FEATURES, Encoded, Encoder
from .mixing import assign
from .records import MissingColumn, parse_record
from .report import SourceReport, raise_if_too_many_bad
from .sources.data_path import Source
from .sources.files import SourceRow

_FORMAT = 4  # increment when the encoding of the same rows changes: old folders are then ignored


@dataclass(frozen=True)
class RowPlan:
    """Which rows of a source are used, and in which split (see mixing.assign).

    eval_fraction 0: no held-out rows. drop_duplicates keeps the first of equal records, across train and eval.
    """

    phase: int
    shares: tuple[float, float, float] | None
    seed: int
    eval_fraction: float
    drop_duplicates: bool
    max_bad_rows: int


@dataclass(frozen=True)
class EncodedSource:
    name: str  # of its folder; differs whenever the rows differ
    train: Dataset
    eval: Dataset
    report: SourceReport


def encoded_source(
    source: Source, encoder: Encoder, plan: RowPlan, *, folder: str, verify: bool = True
) -> EncodedSource:
    """The rows of one source, loaded from its folder inside `folder`, which is built first if missing or damaged.

    Args:
        verify: False where another process of this machine has just verified the folder.

    Raises:
        ValueError: too many bad rows, or no usable row.
    """
    path = Path(folder) / f"{encoder.kind}-{_fingerprint(source, encoder, plan)}"
    if not is_prepared(path, verify=verify):
        with written_folder(path) as unfinished:
            _write(unfinished, source, encoder, plan)
    report = SourceReport(**json.loads((path / "report.json").read_text(encoding="utf-8")))
    train, evaluation = (Dataset.from_file(str(path / f"{split}.arrow")) for split in ("train", "eval"))
    if plan.eval_fraction and not len(evaluation) and len(train) > 1:  # a small source still gives one evaluation row
        last = len(train) - 1
        train, evaluation = train.select(range(last)), train.select([last])
        report = replace(report, train=last, eval=1)
    return EncodedSource(path.name, train, evaluation, report)


def parse_row(row: SourceRow, kind: str, report: SourceReport) -> dict[str, Any] | None:
    """parse_record, or None for a row that is invalid or skipped, which is counted in the report."""
    if row.dropped:
        report.add_dropped(row.dropped)
        return None
    if row.fields is None:
        report.add_bad(row.where, row.error, missing_column=False)
        return None
    try:
        return parse_record(row.fields, kind)
    except ValueError as reason:
        report.add_bad(row.where, str(reason), missing_column=isinstance(reason, MissingColumn))
        return None


def is_prepared(path: Path, *, verify: bool) -> bool:
    """Whether a folder of prepared rows can be used; logs a damaged one."""
    if not path.exists():
        return False
    problems = folder_problems(path) if verify else []
    if problems:
        text = f"warning: {path} is damaged and will be rebuilt ({'; '.join(problems[:3])})"
        print(text, file=sys.stderr, flush=True)
    return not problems


def _write(folder: Path, source: Source, encoder: Encoder, plan: RowPlan) -> None:
    """Encode a source into an empty folder."""
    report = SourceReport(source.name)
    with ExitStack() as stack:
        writers = {}
        for split in ("train", "eval"):
            writer = ArrowWriter(features=FEATURES[encoder.kind], path=str(folder / f"{split}.arrow"))
            stack.callback(writer.close)
            writers[split] = writer
        for split, encoded in _encoded_rows(source, encoder, plan, report):
            writers[split].write(encoded.features)
        for writer in writers.values():
            writer.finalize()
    _require_rows(report, source, plan)
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")


def _encoded_rows(
    source: Source, encoder: Encoder, plan: RowPlan, report: SourceReport
) -> Iterator[tuple[str, Encoded]]:
    """Yields (split, row) for every row that is kept; the others are counted in the report."""
    seen: set[bytes] | None = set() if plan.drop_duplicates else None
    for own_split in sorted(source.splits, reverse=True):  # train, eval
        # Row id that seeds sampling and identifies samples; unique per source and split. Below 2^48, so that it
        # can be multiplied by a number of samples, and is exact as a JSON number.
        first_index = (zlib.crc32(f"{Path(source.name).name}/{own_split}".encode()) & 0xFFFF) << 32
        for index, row in enumerate(source.rows(own_split)):
            watchdog.progress()
            report.add_read(row.fields or {})
            split: str | None = own_split
            if own_split == "train":
                split = assign(
                    index, seed=plan.seed, shares=plan.shares, phase=plan.phase, eval_fraction=plan.eval_fraction
                )
            if split is None:
                report.other_phases += 1
                continue
            record = parse_row(row, encoder.kind, report)
            if record is not None and seen is not None and _is_duplicate(record, seen):
                report.add_dropped("duplicate")
                record = None
            for encoded in [] if record is None else _encode(record, row, first_index + index, encoder, report):
                report.add_kept(split, encoded.features["length"], cut=encoded.cut)
                yield split, encoded
            if len(report.bad) > plan.max_bad_rows:
                report.raise_if_wrong_columns()
                raise_if_too_many_bad(report.bad, plan.max_bad_rows)


def _is_duplicate(record: Mapping[str, Any], seen: set[bytes]) -> bool:
    """Whether an equal record was read before; stores digests, not texts."""
    digest = hashlib.blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=12).digest()
    is_duplicate = digest in seen
    seen.add(digest)
    return is_duplicate


def _encode(
    record: Mapping[str, Any], row: SourceRow, row_index: int, encoder: Encoder, report: SourceReport
) -> list[Encoded]:
    """The encoded rows of a record; skipped rows are counted in the report by reason."""
    try:
        encoded_rows = encoder.encode(record, row.fields, row_index)
    except ValueError as reason:
        report.add_bad(row.where, str(reason), missing_column=False)
        return []
    for encoded in encoded_rows:
        if encoded.features is None:
            report.add_dropped(encoded.skip_reason)
    usable = [encoded for encoded in encoded_rows if encoded.features is not None]
    if usable and (control_strings := encoder.control_tokens(record)):
        report.add_control_tokens(row.where, control_strings)
    return usable


def _require_rows(report: SourceReport, source: Source, plan: RowPlan) -> None:
    """Raises ValueError if no row is left for a split that the source must provide."""
    required_split = "train" if "train" in source.splits else "eval"
    if report.train or (required_split == "eval" and report.eval):
        return
    report.raise_if_wrong_columns()
    if report.rows == 0:
        raise ValueError(f"{source.name} has no rows.")
    advice = "; see the reasons: " + " | ".join(report.bad[:5]) if report.bad else ""
    if report.other_phases == report.rows:
        advice = f": --data_split leaves nothing for step {plan.phase}, so add rows or change the split"
    elif any("long" in reason for reason in report.dropped):
        advice += ": raise the length limit, or truncate over-long rows instead of dropping them"
    raise ValueError(f"No row is left for {required_split}: {report.line()}{advice}.")


def _fingerprint(source: Source, encoder: Encoder, plan: RowPlan) -> str:
    settings = {
        "format": _FORMAT,
        "source": source.identity(),
        "plan": [plan.phase if plan.shares else None, plan.shares, plan.seed, plan.eval_fraction, plan.drop_duplicates],
        "encoder": [
            encoder.kind,
            encoder.max_tokens,
            encoder.drop_overlong,
            encoder.train_on_prompt,
            encoder.parse_special_tokens,
        ],
        "tokenizer": _tokenizer_content(encoder.tokenizer),
    }
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def _tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that affects a tokenizer's ids: vocabulary, merges, rules, special tokens, chat template."""
    if tokenizer.is_fast:
        vocabulary = tokenizer.backend_tokenizer.to_str()
    else:
        vocabulary = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template]
    return hashlib.blake2b((vocabulary + json.dumps(special)).encode()).hexdigest()


def content_digest(rows: Dataset) -> str:
    """Hash of all prepared rows in order: changes with any row, text or reordering."""
    digest = hashlib.sha256()
    # Runs that were started before this column existed can be resumed.
    rows = rows.remove_columns([name for name in ("is_chat",) if name in rows.column_names])
    for table in rows.with_format("arrow").iter(batch_size=4096):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, table.schema.remove_metadata()) as writer:
            writer.write_table(table.replace_schema_metadata().combine_chunks())
        digest.update(sink.getvalue())
        watchdog.progress()
    return digest.hexdigest()[:16]
