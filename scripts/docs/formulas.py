"""LaTeX formulas of Markdown as MathML, which browsers render without a script or a font from the network."""

from __future__ import annotations

import re

from latex2mathml.converter import convert

_FORMULA = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def with_mathml(text: str) -> str:
    """The text with its ```math blocks, which GitHub renders too, replaced by MathML."""
    return _FORMULA.sub(lambda match: f'<div class="formula">{_mathml(match[1])}</div>', text)


def _mathml(latex: str) -> str:
    return convert(" ".join(latex.split()), display="block")
