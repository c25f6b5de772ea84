"""Worker that compares formulas with math-verify: python -m dschat.rewards.math.verify_worker.

Request: [answer, reference, decimals]; result: whether they are equal.
"""

from __future__ import annotations

from dschat.rewards import worker_loop

# Compared once before the first fork: imports math-verify and fills parser and sympy caches, which would take each
# new process a second.
TYPICAL = (
    ("(x+1)^2", "x^2+2x+1"), (r"\sqrt{12}", r"2\sqrt{3}"), (r"\frac{x^2-1}{x-1}", "x+1"), (r"\sin^2 x+\cos^2 x", "1"),
    (r"(1, 2]", "1 < x \\le 2"), (r"\{1, 2\}", "2, 1"), ("x=5", "5"), ("0.3", r"\frac{1}{3}"), (r"2^{10}", "1024"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"), (r"\frac{\pi}{2}", r"\pi"),
)  # fmt: skip


def equal(answer: str, reference: str, decimals: int) -> bool:
    """Whether math-verify considers two formulas equal, irrational numbers rounded to `decimals`."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # Units were already removed by dschat.rewards.math.units: math-verify would also take the t of 5t for one.
    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    extraction = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization)]
    try:
        # math-verify's own timeouts cannot interrupt long integer operations.
        target, gold = (
            parse(f"\\boxed{{{text}}}", extraction, parsing_timeout=None, raise_on_error=False)
            for text in (answer, reference)
        )
        return bool(verify(gold, target, float_rounding=decimals, timeout_seconds=None, raise_on_error=False))
    except RecursionError:
        return False


def main() -> None:
    for answer, reference in TYPICAL:
        equal(answer, reference, 6)
    worker_loop.serve(lambda request: equal(*request))


if __name__ == "__main__":
    main()
