"""Builds the datasets of a step: the user's data paths → mixed train and evaluation rows, with a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from .arrow import EncodedSource, RowPlan, encoded_source, parse_row
from .encoding import Encoder
from .hub_datasets import hub_dataset
from .mixing import mixed_rows, parse_data_split
from .packing import packed
from .report import DataReport, SourceReport, refuse_many_bad, refuse_unknown_columns
from .sources import Source, load_source, parse_data_path

PHASES = {"sft": 1, "preference": 2, "unpaired": 2, "prompt": 3}


@dataclass(frozen=True)
class DataOptions:
    """Options that determine the rows of a step.

    Args:
        data_path: entries "PATH_OR_NAME[:WEIGHT]"; a weight is the fraction of the mixed epoch (see mixed_rows).
        output_path: folder for the Arrow files.
        run_path: the run's own output folder, which no data folder may contain; None: there is none.
        max_tokens: longest prompt for kind "prompt" (max_prompt_seq_len), longest sequence else (max_seq_len).
        data_split: shares of steps 1, 2, 3 such as "2,4,4"; None gives every step all rows.
        phase: 1, 2 or 3; None takes the kind's own (see PHASES).
        seed: for the split, the held-out rows and the mixture.
        eval_data_path: entries whose rows are all used for evaluation; then nothing is held out.
        eval_fraction: share held out of sources without an evaluation split.
        overlong: "truncate" or "drop".
        max_bad_rows: more bad rows than this, over all sources, stop the run. The default tolerates a few damaged
            lines, not a wrong file.
        train_on_prompt: SFT on every token, not on responses only.
        columns: our field ("prompt", "chosen", ...) → the column that the user named for it.
        drop_duplicates: keep the first of equal records of a source.
        parse_special_tokens: encode control-token strings in contents as control tokens; by default as plain text.
        packing: pack several conversations into SFT rows of up to max_tokens (see packing.py).
    """

    data_path: Sequence[str]
    output_path: str
    max_tokens: int
    data_split: str | None = None
    phase: int | None = None
    seed: int = 1234
    eval_data_path: Sequence[str] = ()
    eval_fraction: float = 0.05
    overlong: str = "truncate"
    max_bad_rows: int = 10
    train_on_prompt: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    drop_duplicates: bool = False
    packing: bool = False
    parse_special_tokens: bool = False
    run_path: str | None = None


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
        kind: "sft", "preference" or "prompt".
        verify: check the files on disk against their checksums and rebuild damaged ones; False where another process
            of this machine has just done so.

    Raises:
        ValueError: options out of range, sources that are missing, empty or lack required columns (all are listed),
            too many bad rows, a source without rows for training.
    """
    _check(options, phase=options.phase or PHASES[kind])
    encoder = Encoder.for_kind(
        kind,
        tokenizer,
        max_tokens=options.max_tokens,
        overlong=options.overlong,
        train_on_prompt=options.train_on_prompt,
        parse_special_tokens=options.parse_special_tokens,
    )
    paths, weights = parse_data_path(options.data_path)
    eval_paths = _eval_paths(options)
    entries = [(path, False) for path in paths] + [(path, True) for path in eval_paths]
    parts: list[EncodedSource] = []
    problems: list[str] = []
    for path, for_eval in entries:
        try:
            source = load_source(path, for_eval=for_eval, columns=options.columns)
            source = _with_role(source, options, for_eval)
            plan = _plan(kind, source, options)
            parts.append(encoded_source(source, encoder, plan, folder=options.output_path, verify=verify))
        except ValueError as problem:
            problems.append(str(problem))
    if problems:
        raise ValueError("\n".join(problems))
    reports = [part.report for part in parts]
    refuse_unknown_columns(reports, options.columns)
    refuse_many_bad([bad for report in reports for bad in report.bad], options.max_bad_rows)
    rows = mixed_rows([len(part.train) for part in parts[: len(paths)]], weights, seed=options.seed)
    train = [part.train if weights is None else part.train.select(r) for part, r in zip(parts, rows, strict=False)]
    splits = {"train": concatenate_datasets(train), "eval": concatenate_datasets([part.eval for part in parts])}
    if options.packing:
        names = [part.name for part in parts]
        splits = {name: _packed(rows, options, [name, names, weights], verify) for name, rows in splits.items()}
    report = DataReport(
        reports, [len(r) for r in rows], packed_rows=len(splits["train"]) if options.packing else None,
        parses_special_tokens=options.parse_special_tokens,
    )  # fmt: skip
    return DataSplits(**splits, report=report)


def _packed(rows: Dataset, options: DataOptions, identity: list, verify: bool) -> Dataset:
    return packed(
        rows, capacity=options.max_tokens, seed=options.seed, identity=identity, folder=options.output_path,
        verify=verify,
    )  # fmt: skip


def data_problems(kind: str, options: DataOptions) -> list[str]:
    """Problems of the sources, judged by their first rows: a check before models are loaded."""
    problems, peeked = [], []
    try:
        _check(options, phase=options.phase or PHASES[kind])
        paths, eval_paths = parse_data_path(options.data_path)[0], _eval_paths(options)
    except ValueError as problem:
        return str(problem).split("\n")
    for path, for_eval in [(path, False) for path in paths] + [(path, True) for path in eval_paths]:
        try:
            source = load_source(path, for_eval=for_eval, columns=options.columns)
            peeked.append((source, _first_rows(kind, source, options.max_bad_rows)))
        except ValueError as problem:
            flag, text = "--eval_data_path" if for_eval else "--data_path", str(problem).removeprefix("--data_path ")
            problems.append(f"{flag} {text}" if text.startswith((path, repr(path))) else text)
    return problems or _unknown_columns(peeked, options.columns)


def _first_rows(kind: str, source: Source, max_bad_rows: int) -> SourceReport:
    """A report of the rows up to the first valid one, at most max_bad_rows + 1. Raises ValueError if none is."""
    report = SourceReport(source.name)
    rows = source.rows(next(iter(source.splits)))
    for row in islice(rows, max_bad_rows + 1):
        report.add_read(row.fields or {})
        if parse_row(row, kind, report) is not None:
            return report
    if report.rows == 0:
        raise ValueError(f"{source.name} has no rows.")
    report.refuse_other_columns()
    refuse_many_bad(report.bad, max_bad_rows)
    if len(report.bad) == report.rows <= max_bad_rows:
        raise ValueError(f"{source.name}: no row can be used. {' | '.join(report.bad[:5])}.")
    return report


def _unknown_columns(peeked: Sequence[tuple[Source, SourceReport]], columns: Mapping[str, str]) -> list[str]:
    """A line if a column that the user named is in no row; reads on where the first rows do not have it."""
    missing = set(columns.values()) - {name for _, report in peeked for name in report.columns}
    for source, report in peeked:
        for row in source.rows(next(iter(source.splits))) if missing else ():
            report.add_read(row.fields or {})
            missing -= set(row.fields or {})
            if not missing:
                break
    try:
        refuse_unknown_columns([report for _, report in peeked], columns)
    except ValueError as problem:
        return [str(problem)]
    return []


def _eval_paths(options: DataOptions) -> list[str]:
    return parse_data_path(options.eval_data_path, flag="--eval_data_path")[0] if options.eval_data_path else []


def _check(options: DataOptions, *, phase: int) -> None:
    """Raises ValueError that lists all invalid options.

    Args:
        phase: the step's phase.
    """
    problems = []
    if options.data_split is not None:
        try:
            shares = parse_data_split(options.data_split)
            if phase in (1, 2, 3) and shares[phase - 1] == 0:
                problems.append(f"--data_split {options.data_split}: step {phase} gets no rows.")
        except ValueError as problem:
            problems.append(str(problem))
    if options.phase not in (None, 1, 2, 3):
        problems.append(f"phase {options.phase}: it must be 1, 2 or 3.")
    if not 0 <= options.eval_fraction < 1:
        problems.append(f"--eval_fraction {options.eval_fraction}: it must be at least 0 and less than 1.")
    if options.max_bad_rows < 0:
        problems.append(f"--max_bad_rows {options.max_bad_rows}: it must not be negative.")
    problems += _outputs_among_rows(options)
    if problems:
        raise ValueError("\n".join(problems))


def _outputs_among_rows(options: DataOptions) -> list[str]:
    """Output folders inside a data folder: a later or resumed run would read their files as data."""
    problems = []
    outputs = {"--output_dir": options.run_path, "--data_output_path": options.output_path}
    for flag, entries in (("--data_path", options.data_path), ("--eval_data_path", options.eval_data_path)):
        for path in parse_data_path(entries, flag=flag)[0] if entries else []:
            place = hub_dataset(path)[1]
            folder = Path(place).expanduser()
            if not place.strip() or not folder.is_dir():
                continue
            inside = [
                f"{name} {output}"
                for name, output in outputs.items()
                if output is not None and Path(output).resolve().is_relative_to(folder.resolve())
            ]
            if inside:
                problems.append(
                    f"{' and '.join(inside)}: lies inside {flag} {path}, so the files of this run would be read as its "
                    "data when it is resumed: write to another folder, or name the data files themselves."
                )
    return problems


def _with_role(source: Source, options: DataOptions, for_eval: bool) -> Source:
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
