"""Normalises the LaTeX of short answers: removes whatever does not change the meaning.

Answers with equal normalised text are equal; those with different text may still be equal (see math.equality).
"""

from __future__ import annotations

import re

# 12\,345, 12{,}345 and 12,\!345 are single numbers; so is 12,345, except in brackets, where it may be a pair.
_GROUPED = re.compile(r"(?<![\d.,\\])\d{1,3}(?:(?:,?\\!|\\[,;:]|\{,\}|~)+\s*\d{3})+(?!\d)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
_SYMBOLS = {
    "−": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "°": r"^\circ ", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
}  # fmt: skip
_SYNONYMS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge",
    "neq": "ne", "lbrace": "{", "rbrace": "}",
}  # fmt: skip
_FONTS = "text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|boldsymbol|mbox"
_TOKEN = re.compile(
    r"(?P<row>\s*\\\\(?:\s*\[[^\]]*\])?\s*)"
    r"|(?P<removed>\\(?:left|right)\s*\.|\\(?:left|right|[Bb]igg?[lr]?|displaystyle|textstyle)(?![A-Za-z])|\\!|\\?\$)"
    r"|(?P<space>(?:\\[,;:>]|\\\s|\\q?quad(?![A-Za-z])|~|\s)+)"
    r"|(?P<comma>\s*\{,\})"
    r"|\\degree(?![A-Za-z])(?P<degree>)"
    rf"|\\(?:{_FONTS})\s*\{{(?P<text>[^{{}}]*)\}}"
    r"|\\(?P<command>[A-Za-z]+)"
    r"|(?P<symbol>[−×·÷°π∞≤≥≠])",
    re.DOTALL,
)
_ARGUMENT = r"(\d|[A-Za-z]|\\[A-Za-z]+)"
_FRACTION = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}")
_MIXED = re.compile(r"(?<![\w.)}^/\\])(\d+)(?: (\d+)/(\d+)|\\frac\{(\d+)\}\{(\d+)\})(?=$|[-+=<>,)\]}|\s])")
_OPENING, _CLOSING = r"(?:^|[-+=<>,(\[{|\s])$", r"^(?:$|[-+=<>,)\]}|\s])"


def clean_latex(text: str) -> str:
    """Remove dollars, sizes, fonts and spacing from a formula.

    \\frac and \\sqrt get braces, thousands separators are removed, commas of lists become ", ", and a space is kept
    where it separates two numbers, or a command and a letter. \\text{} is kept around words, and around a single
    letter after a number, which is a unit.
    """
    text = re.sub(r"(?<!\.)\.$", "", text.strip())
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _TOKEN.sub(_cleaned, text)
    text = _THOUSANDS.sub(lambda match: _without_commas(match), text)
    text = re.sub(rf"\\frac\s*{_ARGUMENT}\s*", r"\\frac{\1}", re.sub(r"\\(frac|sqrt)\s+\{", r"\\\1{", text))
    text = re.sub(rf"(\\frac\{{[^{{}}]*\}})\s*{_ARGUMENT}", r"\1{\2}", re.sub(r"\}\s+\{", "}{", text))
    text = re.sub(r"\\sqrt\s*(\d|[A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\d.])\s+|\s+(?![\d.])", _needed_space, text)
    return re.sub(r",\s*", ", ", text).strip()


def one_line(latex: str) -> str:
    """Cleaned LaTeX with a/b for \\frac{a}{b}, its parts in brackets unless they are redundant.

    3\\frac{1}{2} and 3 1/2, digits only, become 7/2; \\text{} is removed, and {} around an exponent of one character.
    """
    latex = re.sub(r"([\^_])\{(\w)\}(?!\w)", r"\1\2", latex)
    latex = _MIXED.sub(_improper, latex)
    previous = None
    while previous != latex:  # innermost first
        previous, latex = latex, _FRACTION.sub(_quotient, latex)
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", latex)


def _cleaned(token: re.Match) -> str:
    """The replacement of a token in the cleaned text."""
    kind, value = token.lastgroup, token[token.lastgroup or 0]
    if kind == "text":
        content = "".join(value.split())
        letters = len(re.findall(r"[A-Za-z]", content))
        unit = letters == 1 and re.search(r"(?:[\d})]|\\pi)(?:\\[,;: ]|\s|~)*$", token.string[: token.start()])
        return rf"\text{{{content}}}" if letters > 1 or unit else " " * letters + content  # not joined to a command
    if kind == "command":
        name = _SYNONYMS.get(value, value)
        return f"\\{name}"
    fixed = {"row": r"\\", "removed": "", "space": " ", "comma": ",", "degree": r"^\circ "}
    return _SYMBOLS[value] if kind == "symbol" else fixed[kind]


def _without_commas(number: re.Match) -> str:
    """A number without thousands separators; inside brackets commas may separate a list and are kept."""
    before = number.string[: number.start()]
    depth = len(re.findall(r"[(\[]|\\\{", before)) - len(re.findall(r"[)\]]|\\\}", before))
    return number[0] if depth > 0 else number[0].replace(",", "")


def _needed_space(space: re.Match) -> str:
    """A space between a command and a following letter; elsewhere nothing."""
    before, after = space.string[: space.start()], space.string[space.end() :]
    return " " if re.search(r"\\[A-Za-z]+$", before) and re.match(r"[A-Za-z]", after) else ""


def _improper(mixed: re.Match) -> str:
    whole, numerator, denominator = (int(part) for part in mixed.groups() if part is not None)
    return mixed[0] if denominator == 0 else f"{whole * denominator + numerator}/{denominator}"


def _quotient(fraction: re.Match) -> str:
    numerator, denominator = fraction.groups()
    before, after = fraction.string[: fraction.start()], fraction.string[fraction.end() :]
    plain = re.fullmatch(r"-?\w+", numerator) and re.fullmatch(r"\d+", denominator)
    if plain and re.search(_OPENING, before) and re.search(_CLOSING, after):
        return f"{numerator}/{denominator}"
    return f"(({numerator})/({denominator}))"
