"""Extracts the final answer of a response: its last number, boxed formula, tag, or whole text."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Literal

from dschat.data.marked_answers import last_boxed, last_tagged
from dschat.rewards.math.latex import clean_latex, one_line

Extraction = Literal["last_number", "boxed", "text", "tag"]
# A sign is part of the number unless directly preceded by an operand, as in "17-4".
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+\u2212])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z])|/0*[1-9][0-9]*)?"
)
LONGEST_FORMULA = 2000  # characters
_LONGEST_NUMBER = 300  # characters: Python does not parse integers of more than 4,300 digits


def extract_answer(text: str, extraction: Extraction) -> str | None:
    """The final answer of a response, normalised so that equal answers are equal strings; None if there is none.

    Args:
        extraction: last_number: the last number, as a fraction in lowest terms ("It is 1,234.50" → "2469/2"); boxed:
            content of the last \\boxed{}; tag: content of the last <answer></answer>; text: the whole response, with
            case and white space normalised.
    """
    if extraction == "last_number":
        number = last_number(text)
        return None if number is None else str(number)
    answer = text
    if extraction == "boxed":
        answer = last_boxed(text)
    elif extraction == "tag":
        answer = last_tagged(text)
    return None if answer is None else (plain_math(answer) if extraction == "boxed" else plain_text(answer)) or None


def plain_text(text: str, *, case: bool = False) -> str:
    """The text with white space collapsed and stripped; lower case unless `case` is True."""
    collapsed = " ".join(text.split())
    return collapsed if case else collapsed.casefold()


def plain_math(text: str) -> str:
    """A normalised formula (see math.latex), without percent signs; a number as a fraction in lowest terms.

    Of formulas longer than LONGEST_FORMULA only the white space is removed: normalising them would take seconds.
    """
    if len(text) > LONGEST_FORMULA:
        return "".join(text.split())
    latex = one_line(clean_latex(text))
    formula = re.sub(r"\\?%", "", latex)
    number = exact_number(formula)
    number = _scientific(latex) if number is None else number
    return formula if number is None else str(number)


def last_number(text: str) -> Fraction | None:
    """The last number in a text: sign, thousands separators, decimals, exponent or a fraction such as 3/4."""
    numbers = [number for match in _NUMBER.finditer(text) if (number := _value(match[0])) is not None]
    return numbers[-1] if numbers else None


def exact_number(value: object) -> Fraction | None:
    """Convert an int, a float, or a text that is exactly one number; otherwise None."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, (int, float)):
        return Fraction(value) if isinstance(value, int) else Fraction(str(value)) if math.isfinite(value) else None
    return _value(value.strip()) if _NUMBER.fullmatch(value.strip()) else None


def _scientific(latex: str) -> Fraction | None:
    """The value of a number such as 1.5\\times10^{3}."""
    match = re.fullmatch(r"([-+]?[\d.]+)\\(?:times|cdot)10\^\{?(-?\d{1,3})\}?", latex)
    factor = exact_number(match[1]) if match else None
    return None if factor is None else factor * Fraction(10) ** int(match[2])


def _value(text: str) -> Fraction | None:
    if len(text) > _LONGEST_NUMBER:
        return None
    numerator, _, denominator = text.replace(",", "").replace("\u2212", "-").partition("/")
    return Fraction(numerator) / Fraction(denominator or 1)
