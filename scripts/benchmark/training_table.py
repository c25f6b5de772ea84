"""Formats rows of the training benchmark as a text table."""

from __future__ import annotations

COLUMNS = ["kind", "lengths", "contender", "tokens/s", "samples/s", "ours ÷ it", "seconds", "% MFU", "peak MiB", "note"]


def training_table(rows: list[dict]) -> str:
    """The rows of one model, aligned and grouped by case; a failed contender has the reason as its note."""
    ours = {case_of(row): row["tokens_per_second"] for row in rows if row["contender"] == "ours"}
    lines = [COLUMNS]
    for before, row in zip([None, *rows], rows, strict=False):
        if before is None or case_of(before) != case_of(row):
            lines.append([""] * len(COLUMNS))
        names = [*case_of(row), row["contender"]]
        rate = row["tokens_per_second"]
        if rate is None:
            lines.append([*names, *["–"] * 6, row["note"]])
            continue
        ratio = f"{ours[case_of(row)] / rate:.2f}" if ours.get(case_of(row)) else "–"
        lines.append([
            *names, f"{rate:,.0f}", f"{row['samples_per_second']:.1f}", ratio, f"{row['seconds']:.2f}",
            f"{100 * row['mfu']:.1f}", f"{row['peak_bytes'] / 2**20:,.0f}", row["note"],
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = {0, 1, 2, len(COLUMNS) - 1}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def case_of(row: dict) -> tuple[str, str]:
    return row["kind"], row["lengths"]
