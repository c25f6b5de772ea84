"""An example of a reward function for step 3: copy it and change it.

    --reward "training/step3_rlhf_finetuning/example_rewards.py:worked_answer?calculations=0.5"

Parameters before the star get lists with one item per response, those after it are options with defaults. README.md
beside this file lists the names of the lists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from dschat.rewards.answer_extraction import exact_number, last_number

NUMBER = r"(\d[\d,]*(?:\.\d+)?)"
CALCULATION = re.compile(rf"(?<![\d.])(-?){NUMBER}\s*([-+*/x×÷−])\s*{NUMBER}\s*=\s*(-?){NUMBER}(?!\s*[-+*/x×÷−]\s*\d)")


def worked_answer(
    responses: Sequence[str], rows: Sequence[dict], *, column: str = "answer", calculations: float = 0.2
) -> list[float | None]:
    """1 if the last number of the response is that of the column, plus `calculations` × the share of correct steps.

    A step is a calculation of two numbers that the response writes down ("4 + 3 = 7"); a response without one has the
    share 0. Irrelevant steps count too, so keep `calculations` small, and read samples.jsonl.

    Args:
        responses: texts.
        rows: the other columns of each prompt's row.

    Returns: a score in [0, 1 + calculations] for each response; None (no score) where the row has no number.
    """
    scores: list[float | None] = []
    for response, row in zip(responses, rows, strict=True):
        truth = exact_number(row.get(column))
        steps = correct_steps(response)
        share = sum(steps) / len(steps) if steps else 0.0
        scores.append(None if truth is None else float(last_number(response) == truth) + calculations * share)
    return scores


def correct_steps(response: str) -> list[bool]:
    """Whether each calculation that the response writes down is correct, in their order."""
    return [_is_correct(*match.groups()) for match in CALCULATION.finditer(response)]


def _is_correct(left_sign: str, left: str, operator: str, right: str, result_sign: str, result: str) -> bool:
    a, b, c = (Fraction(number.replace(",", "")) for number in (left, right, result))
    a, c = (-a if left_sign else a), (-c if result_sign else c)
    if operator in "/÷":
        return b != 0 and a / b == c
    return {"+": a + b, "-": a - b, "−": a - b}.get(operator, a * b) == c
