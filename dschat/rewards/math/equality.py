"""Equality of short answers: numbers by value, formulas by their normalised text, then by mathematical meaning.

math-verify compares meaning, but it ignores several differences that matter (units, bases, primes, the case of letters,
the order of a tuple), so these are compared here first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from dschat.rewards.answer_extraction import LONGEST_FORMULA, exact_number, plain_math
from dschat.rewards.math.latex import clean_latex
from dschat.rewards.math.units import split_unit
from dschat.rewards.math.verify_process import Comparison, math_verify_process

_DECIMALS = 6  # significant decimals required when a decimal approximates an irrational number or a fraction
_GREEK = ("alpha", "beta", "gamma", "delta", "zeta", "eta", "kappa", "mu", "nu", "rho", "sigma", "tau", "phi", "psi")
_SUBSTITUTES = [rf"\{name} " for name in _GREEK]
_LETTER = re.compile(r"\\(?:begin|end|text|mathbb|mathcal)\{[^{}]*\}|\\[A-Za-z]+|([A-Za-z])")
_BASED = re.compile(r"([0-9A-Fa-f]+)_\{?(\d+)\}?")
# Words of at most three letters that are not products of variables.
_WORDS = frozenset({"no", "on", "yes", "odd"})

_math_verify = math_verify_process()


def equal_answers(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Whether the two answers of each (answer, reference) pair are equal; False where the comparison times out.

    Raises:
        ImportError: math-verify is not installed.
    """
    equal: list[bool | None] = [decide_by_form(answer, reference) for answer, reference in pairs]
    undecided = [number for number, decided in enumerate(equal) if decided is None]
    results = _math_verify.results([_to_comparison(*pairs[number]) for number in undecided])
    for number, result in zip(undecided, results, strict=True):
        equal[number] = result
    return [bool(result) for result in equal]


def decide_by_form(answer: str, reference: str) -> bool | None:
    """True or False if the text decides; None if the meaning has to be compared."""
    if plain_math(answer) == plain_math(reference):
        return True
    if max(len(answer), len(reference)) > LONGEST_FORMULA:
        return False
    answer_value, answer_unit = split_unit(clean_latex(answer))
    reference_value, reference_unit = split_unit(clean_latex(reference))
    if answer_unit and reference_unit and answer_unit != reference_unit:
        return False
    if plain_math(answer_value) == plain_math(reference_value):
        return bool(answer_value)
    a, b = (exact_number(plain_math(text)) for text in (answer_value, reference_value))
    if a is not None and b is not None:
        divisors = {None: 1, "percent": 100}  # 50% equals both 50 and 0.5
        scaled_a, scaled_b = a / divisors.get(answer_unit, 1), b / divisors.get(reference_unit, 1)
        return _nearly_equal(a, b) or _nearly_equal(scaled_a, scaled_b)
    base_matches = [_BASED.fullmatch(text) for text in (answer_value, reference_value)]
    if any(base_matches):
        return _equal_with_bases(answer_value, reference_value, base_matches)
    return None if _may_be_equal(answer_value, reference_value) else False


def _may_be_equal(a: str, b: str) -> bool:
    """False if two cleaned formulas differ in something that math-verify ignores."""
    if not a or not b or any(re.search(r"[\d.]\s+[\d.]", text) for text in (a, b)):
        return False  # math-verify would add numbers separated by a space
    if a.count("'") + a.count(r"\prime") != b.count("'") + b.count(r"\prime"):
        return False
    if {_brackets(a), _brackets(b)} == {"set", "tuple"}:
        return False
    words = [re.fullmatch(r"(\\text\{)?([A-Za-z]{2,})\}?", text) for text in (a, b)]
    if all(words):  # math-verify would parse them as commuting products of letters
        letters = [match[2].casefold() for match in words]
        products = not any(match[1] for match in words) and max(map(len, letters)) <= 3 and not _WORDS & set(letters)
        return products or letters[0] == letters[1]
    return True


def _equal_with_bases(a: str, b: str, base_matches: list[re.Match | None]) -> bool:
    """Numbers with a base: equal values, or equal digits if one has no base."""
    if all(base_matches):
        try:
            return int(base_matches[0][1], int(base_matches[0][2])) == int(base_matches[1][1], int(base_matches[1][2]))
        except ValueError:  # invalid base or digit
            return False
    digits = [match[1] if match else text for match, text in zip(base_matches, (a, b), strict=True)]
    return digits[0].casefold() == digits[1].casefold()


def _nearly_equal(a: Fraction, b: Fraction) -> bool:
    """Equal, or one is a fraction without a finite decimal, and the other its rounding to at least six digits."""
    if a == b:
        return True
    repeating, decimal = (a, b) if _decimal_places(b) is not None else (b, a)
    places = _decimal_places(decimal)
    if places is None or _decimal_places(repeating) is not None or not decimal:
        return False
    return places >= _DECIMALS + _leading_zeros(decimal) and abs(repeating - decimal) <= Fraction(1, 2 * 10**places)


def _decimal_places(number: Fraction) -> int | None:
    """Digits after the decimal point; None for a number without a finite decimal."""
    places, remainder = 0, number.denominator
    for prime in (2, 5):
        power = 0
        while remainder % prime == 0:
            remainder, power = remainder // prime, power + 1
        places = max(places, power)
    return places if remainder == 1 else None


def _leading_zeros(number: Fraction) -> int:
    zeros = 0
    while 0 < abs(number) < Fraction(1, 10):
        number, zeros = number * 10, zeros + 1
    return zeros


def _brackets(formula: str) -> str | None:
    """Kind of the enclosing brackets: "set", "tuple" (or interval), or None."""
    if re.fullmatch(r"\\\{.*\\\}", formula):
        return "set"
    inner = re.fullmatch(r"[(\[](.*)[)\]]", formula)
    depth = 0
    for character in inner[1] if inner else "":
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if depth == 0 and character == ",":
            return "tuple"
    return None


def _to_comparison(answer: str, reference: str) -> Comparison:
    """Input for math-verify, rewritten so that letter case, tuple order and tiny numbers count."""
    formulas = []
    for text in (answer, reference):
        formula, unit = split_unit(clean_latex(text))
        formulas.append(rf"{formula}\%" if unit == "percent" else formula)
    lists = [", " in formula and _brackets(formula) is None and "=" not in formula for formula in formulas]
    for i, other in ((0, 1), (1, 0)):
        if lists[i] and _brackets(formulas[other]) == "tuple":
            formulas[i] = f"({formulas[i]})"  # else math-verify ignores its order
    answer, reference = _distinguish_case(formulas)
    zeros = max((len(match) for text in formulas for match in re.findall(r"\.(0+)[1-9]", text)), default=0)
    return Comparison(answer, reference, decimals=_DECIMALS + zeros)


def _distinguish_case(formulas: list[str]) -> list[str]:
    """Rename X if one formula has both X and x, which math-verify treats as the same letter."""
    unused = [name for name in _SUBSTITUTES if not any(name.strip() in text for text in formulas)]
    names: dict[str, str] = {}
    for text in formulas:
        letters = {match[1] for match in _LETTER.finditer(text) if match[1]}
        for letter in sorted(letters):
            if letter.isupper() and letter.lower() in letters and letter not in names and unused:
                names[letter] = unused.pop(0)
    return [_LETTER.sub(lambda match: names.get(match[1], match[0]), text) for text in formulas]
