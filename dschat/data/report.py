"""Data reports: counts of used, skipped and invalid rows per source, with the locations of invalid ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_LISTED_ROWS = 20  # rows listed individually in a report


@dataclass
class SourceReport:
    """Counts of one source; every row read is in exactly one of other_phases, bad, dropped, train, eval."""

    name: str
    rows: int = 0
    other_phases: int = 0
    bad: list[str] = field(default_factory=list)  # "file:line: reason"
    missing_columns: int = 0  # bad rows that lack the required columns
    dropped: dict[str, int] = field(default_factory=dict)  # reason → rows
    cut: int = 0  # truncated rows among those kept
    train: int = 0
    eval: int = 0
    tokens: int = 0  # of the kept rows
    longest: int = 0
    columns: list[str] = field(default_factory=list)  # of all rows, in order of first appearance
    control_tokens: int = 0  # kept rows with a control-token string inside a content
    control_token_rows: list[str] = field(default_factory=list)  # the first of these: "file:line (<|im_end|>)"

    def add_read(self, row: Mapping[str, Any]) -> None:
        self.rows += 1
        self.columns += [name for name in row if name not in self.columns]

    def add_bad(self, where: str, reason: str, *, missing_column: bool) -> None:
        self.bad.append(f"{where}: {reason}")
        self.missing_columns += missing_column

    def add_dropped(self, reason: str) -> None:
        self.dropped = dict(Counter(self.dropped) + Counter([reason]))

    def add_kept(self, split: str, length: int, *, cut: bool) -> None:
        self.train += split == "train"
        self.eval += split == "eval"
        self.cut += cut
        self.tokens += length
        self.longest = max(self.longest, length)

    def add_control_tokens(self, where: str, tokens: Sequence[str]) -> None:
        self.control_tokens += 1
        if len(self.control_token_rows) < MAX_LISTED_ROWS:
            self.control_token_rows.append(f"{where} ({' '.join(tokens)})")

    def raise_if_wrong_columns(self) -> None:
        """Raises ValueError if all rows so far lack the required columns, which means the wrong file."""
        kept = self.train + self.eval + sum(self.dropped.values())
        if kept == 0 and self.bad and self.missing_columns == len(self.bad):
            raise ValueError(f"{self.name}: no row has the columns of this step. {self.bad[0]}.")

    def line(self) -> str:
        """One line for the console."""
        kept = self.train + self.eval
        dropped = "".join(f", {count} dropped ({reason})" for reason, count in self.dropped.items())
        other = f", {self.other_phases} in other phases" if self.other_phases else ""
        return (
            f"{self.name}: {self.rows} rows read{other}, {len(self.bad)} bad{dropped}, {self.cut} cut; "
            f"{self.train} train + {self.eval} eval, {self.tokens / max(kept, 1):.0f} tokens on average, "
            f"{self.longest} at most"
        )


@dataclass(frozen=True)
class DataReport:
    """All sources of a step, those of --eval_data_path last.

    `epoch_rows`: rows of each source in a mixed epoch; `packed_rows`: rows after packing;
    `parses_special_tokens`: control-token strings in contents were encoded as control tokens.
    """

    sources: Sequence[SourceReport]
    epoch_rows: Sequence[int]
    packed_rows: int | None = None
    parses_special_tokens: bool = False

    @property
    def bad(self) -> list[str]:
        return [bad for source in self.sources for bad in source.bad]

    def summary(self) -> str:
        """Lines for the console: each source, its bad rows, and the epoch size if weights changed it."""
        lines = [source.line() for source in self.sources]
        lines += [f"  skipped: {bad}" for bad in self.bad]
        lines += self._control_token_lines()
        trained = [source for source in self.sources if source.train]
        if [source.train for source in trained] != list(self.epoch_rows):
            mixed = ", ".join(f"{rows} of {s.name}" for s, rows in zip(trained, self.epoch_rows, strict=True))
            lines.append(f"mixed epoch: {mixed}")
        if self.packed_rows is not None:
            lines.append(f"packed: {sum(self.epoch_rows)} conversations to train on into {self.packed_rows} rows")
        return "\n".join(lines)

    def _control_token_lines(self) -> list[str]:
        count = sum(source.control_tokens for source in self.sources)
        if not count:
            return []
        outcome = "became control tokens (--parse_special_tokens)" if self.parses_special_tokens else (
            "stayed plain text; pass --parse_special_tokens if they are meant as control tokens"
        )  # fmt: skip
        listed = [row for source in self.sources for row in source.control_token_rows][:MAX_LISTED_ROWS]
        more = [f"  … and {count - len(listed)} more"] if count > len(listed) else []
        return [f"control tokens in the contents of {count} rows {outcome}:", *(f"  {row}" for row in listed), *more]


def raise_if_too_many_bad(bad: Sequence[str], max_bad_rows: int) -> None:
    """Raises ValueError, listing the first five, if there are more bad rows than allowed."""
    if len(bad) > max_bad_rows:
        listed = "".join(f"\n  {reason}" for reason in bad[:5])
        raise ValueError(
            f"More than --max_bad_rows {max_bad_rows} rows cannot be used. The first of them:{listed}\n"
            "Fix the file, or raise --max_bad_rows to skip such rows."
        )


def raise_if_unknown_columns(sources: Sequence[SourceReport], columns: Mapping[str, str]) -> None:
    """Raises ValueError if a user-defined column (our field → column) occurs in no row of any source."""
    present = list(dict.fromkeys(name for source in sources for name in source.columns))
    unknown = [f"--{field}_column {column}" for field, column in columns.items() if column not in present]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: in no row of the data. It has columns {', '.join(present) or 'none'}.")
