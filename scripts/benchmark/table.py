"""Formats benchmark rows as a text table."""

from __future__ import annotations

COLUMNS = ["batch", "prompts", "lengths", "contender", "tokens/s", "best", "ours ÷ it", "% bandwidth", "warm-up s",
         "peak MiB", "note"]  # fmt: skip


def table(rows: list[dict]) -> str:
    """The rows of one model, aligned and grouped by case; a failed contender has the reason as its note."""
    ours_rates = {_case(r): r["tokens_per_second"] for r in rows if r["contender"] == "ours"}
    lines = [COLUMNS]
    for before, r in zip([None, *rows], rows, strict=False):
        case, rate = _case(r), r["tokens_per_second"]
        if before is None or _case(before) != case:
            lines.append([""] * len(COLUMNS))
        names = [*map(str, case), r["contender"]]
        if rate is None:
            lines.append([*names, *["–"] * 6, r["note"]])
            continue
        ratio = f"{ours_rates[case] / rate:.2f}" if ours_rates.get(case) else "–"
        numbers = [f"{rate:,.0f}", f"{r['best_tokens_per_second']:,.0f}", ratio, f"{r['percent_of_bandwidth']:.1f}"]
        lines.append([*names, *numbers, f"{r['warmup_seconds']:.1f}", f"{r['peak_bytes'] / 2**20:,.0f}", r["note"]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = {0: str.rjust, 1: str.ljust, 2: str.ljust, 3: str.ljust, len(COLUMNS) - 1: str.ljust}
    return "\n".join(
        "  ".join(left.get(i, str.rjust)(cell, width) for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
        .rstrip()
        for line in lines
    )  # fmt: skip


def greedy_line(rows: list[dict]) -> str:
    """Number of greedy tokens equal to those of `generate`, over the cases of a model."""
    by_case = {_case(r): r["equal_greedy_tokens"] for r in rows}
    counts = [equal for equal in by_case.values() if not isinstance(equal, str)]
    parts = [f"{sum(a for a, _ in counts):,} of {sum(b for _, b in counts):,}"] if counts else []
    parts += sorted({equal for equal in by_case.values() if isinstance(equal, str)})
    return "greedy tokens in float32 equal to generate's: " + "; ".join(parts)


def _case(row: dict) -> tuple[int, str, str]:
    return row["batch"], row["prompts"], row["lengths"]
