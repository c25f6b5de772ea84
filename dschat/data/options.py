"""Options that determine the rows of a step, and their validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .mixing import parse_data_split
from .sources.data_path import parse_data_path
from .sources.hub_datasets import hub_dataset


@dataclass(frozen=True)
class DataOptions:
    """Options that determine the rows of a step.

    Args:
        data_path: entries "PATH_OR_NAME[:WEIGHT]"; a weight is the fraction of the mixed epoch (see mixed_rows).
        output_path: folder for the Arrow files.
        run_path: the run's own output folder, which no data folder may contain; None: there is none.
        max_tokens: longest prompt for kind "prompt" (max_prompt_seq_len), longest sequence else (max_seq_len).
        data_split: shares of steps 1, 2, 3 such as "2,4,4"; None gives every step all rows.
        phase: 1, 2 or 3; None takes the kind's own (sft 1, preference 2, prompt 3).
        seed: for the split, the held-out rows and the mixture.
        eval_data_path: entries whose rows are all used for evaluation; then nothing is held out.
        eval_fraction: share held out of sources without an evaluation split.
        overlong: "truncate" or "drop".
        max_bad_rows: more bad rows than this, over all sources, stop the run. The default tolerates a few damaged
            lines, not a wrong file.
        train_on_prompt: SFT on every token, not on responses only.
        columns: field ("prompt", "chosen", ...) → the user's column for it.
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


def check_options(options: DataOptions, *, phase: int) -> None:
    """Raises ValueError that lists all invalid options.

    Args:
        phase: of the step, 1, 2 or 3.
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
    problems += _outputs_in_data_folders(options)
    if problems:
        raise ValueError("\n".join(problems))


def _outputs_in_data_folders(options: DataOptions) -> list[str]:
    """Output folders inside a data folder: a later or resumed run would read their files as data."""
    problems = []
    outputs = {"--output_dir": options.run_path, "--data_output_path": options.output_path}
    for flag, entries in (("--data_path", options.data_path), ("--eval_data_path", options.eval_data_path)):
        for path in parse_data_path(entries, flag=flag)[0] if entries else []:
            name_or_path = hub_dataset(path)[1]
            folder = Path(name_or_path).expanduser()
            if not name_or_path.strip() or not folder.is_dir():
                continue
            inside = [
                f"{name} {output}"
                for name, output in outputs.items()
                if output is not None and Path(output).resolve().is_relative_to(folder.resolve())
            ]
            if inside:
                problems.append(
                    f"{' and '.join(inside)}: lies inside {flag} {path}, so the files of this run would be read as its "
                    "data when it is resumed: write to another folder, or pass the data files themselves."
                )
    return problems
