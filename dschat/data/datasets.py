"""Builds the datasets of a step: the user's data paths → mixed train and evaluation rows, with a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from .arrow import EncodedSource, RowPlan, encoded_source, parse_row
from .encoding import Encoder
from .mixing import mixed_rows, parse_data_split
from .options import DataOptions, check_options
from .packing import packed
from .report import DataReport, SourceReport, raise_if_too_many_bad, raise_if_unknown_columns
from .sources.data_path import Source, load_source, parse_data_path

PHASES = {"sft": 1, "preference": 2, "unpaired": 2, "prompt": 3}


@dataclass(frozen=True)
class DataSplits:
    """Rows of FEATURES[kind]; `length` is a row's number of tokens. eval may be empty (eval_fraction 0)."""

    train: Dataset
    eval: Dataset
    report: DataReport


def build_dataset(
    kind: str, tokenizer: PreTrainedTokenizerBase, options: DataOptions, *, verify: bool = True
) -> DataSplits:
    """The train and evaluation rows of a step, encoded on the first call and read from disk on later ones.

    Call it on one process per machine first, then on the others, which read the files. The tokenizer must have a chat
    template (ensure_chat_template).

    Args:
        kind: "sft", "preference", "unpaired" or "prompt".
        verify: check the files on disk against their checksums and rebuild damaged ones; False where another process
            of this machine has just done so.

    Raises:
        ValueError: options out of range, sources that are missing, empty or lack required columns (all are listed),
            too many bad rows, a source without rows for training.
    """
    check_options(options, phase=options.phase or PHASES[kind])
    encoder = Encoder.for_kind(
        kind,
        tokenizer,
        max_tokens=options.max_tokens,
        overlong=options.overlong,
        train_on_prompt=options.train_on_prompt,
        parse_special_tokens=options.parse_special_tokens,
    )
    parts = _encoded_sources(kind, encoder, options, verify=verify)
    reports = [part.report for part in parts]
    raise_if_unknown_columns(reports, options.columns)
    raise_if_too_many_bad([bad for report in reports for bad in report.bad], options.max_bad_rows)
    paths, weights = parse_data_path(options.data_path)
    epoch_rows = mixed_rows([len(part.train) for part in parts[: len(paths)]], weights, seed=options.seed)
    train = [
        part.train if weights is None else part.train.select(rows)
        for part, rows in zip(parts, epoch_rows, strict=False)
    ]
    splits = {"train": concatenate_datasets(train), "eval": concatenate_datasets([part.eval for part in parts])}
    if options.packing:
        names = [part.name for part in parts]
        splits = {name: _packed(rows, options, [name, names, weights], verify) for name, rows in splits.items()}
    report = DataReport(
        reports, [len(rows) for rows in epoch_rows], packed_rows=len(splits["train"]) if options.packing else None,
        parses_special_tokens=options.parse_special_tokens,
    )  # fmt: skip
    return DataSplits(**splits, report=report)


def _encoded_sources(kind: str, encoder: Encoder, options: DataOptions, *, verify: bool) -> list[EncodedSource]:
    """The encoded sources of --data_path, then those of --eval_data_path; raises ValueError that lists all problems."""
    parts: list[EncodedSource] = []
    problems: list[str] = []
    for path, for_eval in _entries(options):
        try:
            source = load_source(path, for_eval=for_eval, columns=options.columns)
            source = _select_splits(source, options, for_eval)
            plan = _plan(kind, source, options)
            parts.append(encoded_source(source, encoder, plan, folder=options.output_path, verify=verify))
        except ValueError as problem:
            problems.append(str(problem))
    if problems:
        raise ValueError("\n".join(problems))
    return parts


def _entries(options: DataOptions) -> list[tuple[str, bool]]:
    """(path, whether it is for evaluation only) of each source."""
    eval_entries = options.eval_data_path
    eval_paths = parse_data_path(eval_entries, flag="--eval_data_path")[0] if eval_entries else []
    return [(path, False) for path in parse_data_path(options.data_path)[0]] + [(path, True) for path in eval_paths]


def _packed(rows: Dataset, options: DataOptions, identity: list, verify: bool) -> Dataset:
    return packed(
        rows, capacity=options.max_tokens, seed=options.seed, identity=identity, folder=options.output_path,
        verify=verify,
    )  # fmt: skip


def data_problems(kind: str, options: DataOptions) -> list[str]:
    """Problems of the sources, found in their first rows: a check before models are loaded."""
    problems, checked = [], []
    try:
        check_options(options, phase=options.phase or PHASES[kind])
        entries = _entries(options)
    except ValueError as problem:
        return str(problem).split("\n")
    for path, for_eval in entries:
        try:
            source = load_source(path, for_eval=for_eval, columns=options.columns)
            checked.append((source, _first_rows(kind, source, options.max_bad_rows)))
        except ValueError as problem:
            flag, text = "--eval_data_path" if for_eval else "--data_path", str(problem).removeprefix("--data_path ")
            problems.append(f"{flag} {text}" if text.startswith((path, repr(path))) else text)
    return problems or _unknown_columns(checked, options.columns)


def _first_rows(kind: str, source: Source, max_bad_rows: int) -> SourceReport:
    """A report of the rows up to the first valid one, at most max_bad_rows + 1. Raises ValueError if none is valid."""
    report = SourceReport(source.name)
    for row in islice(source.rows(next(iter(source.splits))), max_bad_rows + 1):
        report.add_read(row.fields or {})
        if parse_row(row, kind, report) is not None:
            return report
    if report.rows == 0:
        raise ValueError(f"{source.name} has no rows.")
    report.raise_if_wrong_columns()
    raise_if_too_many_bad(report.bad, max_bad_rows)
    if len(report.bad) == report.rows <= max_bad_rows:
        raise ValueError(f"{source.name}: no row can be used. {' | '.join(report.bad[:5])}.")
    return report


def _unknown_columns(checked: Sequence[tuple[Source, SourceReport]], columns: Mapping[str, str]) -> list[str]:
    """A line if no row has a column that the user named; reads further rows where the first ones lack it."""
    missing = set(columns.values()) - {name for _, report in checked for name in report.columns}
    for source, report in checked:
        for row in source.rows(next(iter(source.splits))) if missing else ():
            report.add_read(row.fields or {})
            missing -= set(row.fields or {})
            if not missing:
                break
    try:
        raise_if_unknown_columns([report for _, report in checked], columns)
    except ValueError as problem:
        return [str(problem)]
    return []


def _select_splits(source: Source, options: DataOptions, for_eval: bool) -> Source:
    """The source with the splits that this run uses: --eval_data_path replaces all other evaluation rows."""
    if for_eval:
        return replace(source, splits={"eval": source.splits.get("eval") or source.splits["train"]})
    return replace(source, splits={"train": source.splits["train"]}) if options.eval_data_path else source


def _plan(kind: str, source: Source, options: DataOptions) -> RowPlan:
    holds_out = "eval" not in source.splits and not options.eval_data_path
    return RowPlan(
        phase=options.phase or PHASES[kind],
        shares=None if options.data_split is None else parse_data_split(options.data_split),
        seed=options.seed,
        eval_fraction=options.eval_fraction if holds_out else 0.0,
        drop_duplicates=options.drop_duplicates,
        max_bad_rows=options.max_bad_rows,
    )
