"""Splits the unit off an answer: 5\\text{ cm}, 90^\\circ, 50\\%, 3 hours."""

from __future__ import annotations

import re

_SPELLINGS = {
    "millimeter": "mm", "centimeter": "cm", "meter": "m", "kilometer": "km", "inch": "in", "foot": "ft feet",
    "yard": "yd", "mile": "mi", "gram": "g gm", "kilogram": "kg", "milligram": "mg", "pound": "lb", "ounce": "oz",
    "second": "s sec", "minute": "min", "hour": "h hr", "day": "", "week": "", "month": "", "year": "yr", "liter": "l",
    "milliliter": "ml", "degree": "deg", "percent": "pct", "dollar": "usd", "cent": "", "euro": "eur", "unit": "",
    "mph": "mileperhour", "km/h": "kmph kph", "radian": "rad", "acre": "", "hectare": "ha", "gallon": "gal",
}  # fmt: skip
_UNITS = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in [unit, *spellings.split()]}
# Words after a number that change its value.
_MAGNITUDE = re.compile(
    r"(ten|hundred|thousand|[mbtr]+illion|dozen|half|halve|third|quarter|fifth|sixth|seventh|eighth|ninth|and|or|to|i|e|pi)"
    r"(th)?s?", re.IGNORECASE,
)  # fmt: skip
_POWER = r"(?:\^\{?(?P<power>-?\d)\}?)?"
_TEXT = re.compile(rf"(?P<value>.*[\d)}}\]]|.*\\pi)\s*\\text\{{(?P<unit>[A-Za-z./]+)\}}{_POWER}")
_DEGREES = re.compile(r"(?P<value>.+)\^\{?\\circ\s?\}?(?:\\text\{)?(?P<scale>[CFK]?)\}?")
_PERCENT = re.compile(r"(?P<value>.+?)\\?%")
_BARE = re.compile(
    rf"(?P<value>.*[\d)}}\]])\s*(?P<unit>{'|'.join(sorted((name for name in _UNITS if len(name) > 1), key=len)[::-1])})"
    rf"(?:e?s)?{_POWER}"
)


def split_unit(latex: str) -> tuple[str, str | None]:
    """Split a cleaned formula (see clean_latex) into value and normalised unit; None without a unit.

    A single letter after a number is a variable, unless it is upright: 5m is a product, 5\\text{ m} is a length.
    """
    if match := _PERCENT.fullmatch(latex):
        return match["value"].strip(), "percent"
    if match := _DEGREES.fullmatch(latex):
        return match["value"].strip(), f"degree{match['scale']}"
    match = _TEXT.fullmatch(latex) or _BARE.fullmatch(latex)
    if not match or _MAGNITUDE.fullmatch(match["unit"]):
        return latex, None
    return match["value"].strip(), _canonical(match["unit"], match["power"])


def _canonical(unit: str, power: str | None) -> str:
    name = unit.casefold().replace(".", "").replace("metre", "meter").replace("litre", "liter")
    for prefix, exponent in (("square", "2"), ("sq", "2"), ("cubic", "3"), ("cu", "3")):
        if name.startswith(prefix) and name != prefix and not name.startswith("cup"):
            name, power = name.removeprefix(prefix), exponent
    singular = next((name.removesuffix(suffix) for suffix in ("es", "s") if name.removesuffix(suffix) in _UNITS), None)
    name = _UNITS.get(name) or _UNITS.get(singular) or name.removesuffix("s")
    return name if power in (None, "1") else f"{name}^{power}"
