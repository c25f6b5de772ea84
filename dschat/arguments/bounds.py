"""Bounds of a number that a user sets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

LARGEST_FLOAT32 = 3.4028234663852886e38


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Range of a number; None: unbounded on that side.

    Attributes:
        finite: False: inf is allowed too, whatever at_most is, and means no limit; NaN never is.
    """

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None
    finite: bool = True

    def broken_rule(self, number: Any) -> str:
        """The rule that a number breaks, or ""; floats end up in float32 tensors, integers in int64."""
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
        if isinstance(number, float) and not abs(number) <= LARGEST_FLOAT32:
            return f"a finite number (of float32: at most {LARGEST_FLOAT32:.2g})" + ("" if self.finite else ", or inf")
        if isinstance(number, int) and not -(2**63) <= number < 2**63:
            return "an integer of 64 bits"
        return ""
