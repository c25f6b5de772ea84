"""Bounds of numeric flags."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

LARGEST_FLOAT, LARGEST_INTEGER = 1e15, 2**31 - 1  # for flags without a bound of their own
SMALLEST_FLOAT32 = 1.1754943508222875e-38


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Range of a number; None: unbounded on that side.

    Attributes:
        finite: False: inf is allowed too, whatever at_most is, and means no limit; NaN is never allowed.
    """

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None
    finite: bool = True

    def violation(self, number: Any) -> str:
        """The bound that a number violates, or "". Values must fit float32 tensors, and products of integers int64."""
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            return ""
        if not self.finite and number == math.inf:
            return ""
        rules = {
            f"at least {self.at_least}": self.at_least is None or number >= self.at_least,
            f"above {self.above}": self.above is None or number > self.above,
            f"below {self.below}": self.below is None or number < self.below,
            f"at most {self.at_most}": self.at_most is None or number <= self.at_most,
        }
        if not all(rules.values()):
            return " and ".join(rule for rule in rules if not rule.endswith(" None"))
        default = LARGEST_FLOAT if isinstance(number, float) else LARGEST_INTEGER
        largest = default if self.at_most is None else self.at_most
        if not abs(number) <= largest:
            return f"a finite number of at most {largest:g}" + ("" if self.finite else ", or inf")
        if 0 < abs(number) < SMALLEST_FLOAT32:
            return f"0 or at least {SMALLEST_FLOAT32:.2g}: it is 0 in float32"
        return ""
