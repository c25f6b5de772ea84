"""Answers in \\boxed{}: tables of equal and unequal pairs, and limits on the cost of a comparison."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dschat.rewards.answer_extraction import plain_math
from dschat.rewards.math import verify_process
from dschat.rewards.math.equality import equal_answers
from dschat.rewards.math.latex import clean_latex, one_line
from dschat.rewards.math.units import split_unit
from dschat.rewards.math.verify_process import Comparison, math_verify_process
from dschat.rewards.rules import RULES
from dschat.rewards.specification import reward_problems
from dschat.rewards.worker_process import TimeLimits

# answer = truth, by the kind of difference between them
EQUAL = r"""
numbers        5 = 5.0 | 05 = 5 | +5 = 5 | .5 = 0.5 | 0.50 = 0.5 | -0 = 0 | 10. = 10 | --5 = 5 | -(-5) = 5
thousands      32,349 = 32349 | 32{,}349 = 32349 | 32\,349 = 32349 | 12,\!345 = 12345 | 12\!\,345 = 12345
thousands      1,234,567.5 = 1234567.5 | 1,234 \text{ m} = 1234 | (1{,}234, 5) = (1234,5)
fractions      1/2 = 0.5 | \frac{1}{2} = .5 | \dfrac{3}{4} = \tfrac34 | \frac12 = \frac 1 2 | \frac{2}{4} = 1/2
fractions      -\frac{1}{2} = \frac{-1}{2} | \frac{1}{-2} = -0.5 | \frac{7}{2} = 3.5 | 1/3 = 0.333333
fractions      \frac{2}{3} = 0.6666667 | \frac{1}{\frac{2}{3}} = 3/2 | \frac\pi2 = \frac{\pi}{2}
mixed          3 1/2 = 7/2 | 3\frac{1}{2} = 3.5 | -3\frac12 = -\frac{7}{2} | 1\dfrac{3}{4} = 1.75 | x=3\frac12 = 7/2
products       \frac{1}{2}x = \frac{x}{2} | \frac{1}{2}3 = \frac{3}{2} | 2\frac{x}{3} = \frac{2x}{3} | 2 \cdot x = 2x
percent        50\% = 50 | 50\% = 0.5 | 50 = 50\% | 12.5\% = \frac{1}{8} | \frac{1}{2}\% = 0.005 | 50\,\% = 50%
degrees        90^\circ = 90 | 90^{\circ} = 90° | 90 = 90^\circ | 60\text{ degrees} = 60^\circ
units          5\text{ cm} = 5 | 5 = 5\text{ cm} | 5\,\mathrm{cm} = 5\text{ centimeters} | 5 cm = 5\text{ cm}
units          5\text{ cm}^2 = 5\text{ square centimeters} | 3\text{ hours} = 3\text{ hr} | \$5 = 5
units          7\text{ apples} = 7 | 12 inches = 12\text{ in} | 2\pi\,\mathrm{m} = 2\pi
units          \$10.50 = 10.5 | \sqrt{2}\text{ m} = \sqrt{2} | 5\text{ dollars} = \$5 | 2\pi\text{ cm} = 2\pi
text           \text{yes} = Yes | \text{(A)} = A | \textbf{B} = B | \mathrm{no solution} = \text{No Solution}
assignments    x=5 = 5 | 5 = x=5 | x = 5 = x=5 | y=2x+1 = 2x+1 | x=1 \text{ or } x=2 = 1,2
lists          1,2 = 1, 2 | 1,2 = 2,1 | 3 \text{ and } 5 = 3,5 | \{1,2\} = \{2,1\} | 1,2 = \{1,2\}
tuples         (1,2) = (1, 2) | (3, \frac{\pi}{2}) = \left( 3, \frac\pi2 \right) | (1,2,3) = 1,2,3
intervals      [1,2) = [1, 2) | x \ge 2 = x\geq2 | (1,2)\cup(3,4) = (1,2) \cup (3,4) | x>2 = 2<x
matrices       \begin{pmatrix}1\\2\end{pmatrix} = \begin{pmatrix} 1 \\ 2 \end{pmatrix}
matrices       \begin{pmatrix}1&2\\3&4\end{pmatrix} = \begin{bmatrix}1 & 2\\[2pt] 3 & 4\end{bmatrix}
plus-minus     1 \pm \sqrt{2} = 1\pm\sqrt2 | 1 \pm \sqrt{2} = 1-\sqrt{2}, 1+\sqrt{2}
powers of ten  1.5\times 10^{3} = 1500 | 1.5 \cdot 10^3 = 1500 | 1.5e3 = 1500 | 2 \times 10^{-3} = 0.002
roots          \sqrt{12} = 2\sqrt{3} | \sqrt2 = \sqrt{2} | \sqrt[3]{8} = 2 | \frac{\sqrt3}{3} = \frac{1}{\sqrt{3}}
roots          \sqrt{2} = 1.41421356 | 11\sqrt{2} = 11 \sqrt 2
algebra        y^2+x^2 = x^2+y^2 | a^2-b^2 = (a-b)(a+b) | 2^3\cdot 3^2 = 72 | 5\! = 5 | (x+1)^2 = x^2+2x+1
algebra        x^{2} = x^2 | x^{-1} = \frac1x | 2^{10} = 1024 | 10! = 3628800 | \binom{5}{2} = 10 | |-5| = 5
algebra        \frac{1}{2}\pi = \frac{\pi}{2} | \pi r^2 = r^2\pi | \sin^2 x+\cos^2 x = 1 | 3^{2x} = 9^x | x^{10} = x^10
bases          101_2 = 101_{2} | 101_2 = 101 | 101_2 = 5_{10}
"""
UNEQUAL = r"""
brackets       \frac{1}{2}x = \frac{1}{2x} | \frac{1}{2}3 = 1/23 | \frac{1}{2}3 = \frac{1}{23} | \frac{x}{2}3 = x/23
brackets       \frac{3}{2}^2 = \frac{3}{2^2} | \frac{1}{2}! = 1/2! | \frac{1}{2\pi} = \frac{\pi}{2} | x^{2}3 = x^{23}
brackets       2\frac{x}{3} = 2+\frac{x}{3} | 2\frac{1}{x} = 2+1/x | x^{\frac{1}{2}} = \frac{x^1}{2}
brackets       \frac{a+b}{2} = a+b/2
mixed          3 1/2 = 31/2 | 3\frac{1}{2} = 3/2 | 3\frac{1}{2} = \frac{31}{2} | 3 1/2 = 2 | x3\frac12 = x+7/2
spaces         1 2 = 12 | 1 2 = 3 | 32, 349 = 32349 | 32 349 = 381 | 1\,2 = 12 | 1, 2 = 12 | 1,2 = 1.2 | 2,3,4 = 234
thousands      (1,234) = 1234 | \{1,234\} = 1234 | 1,23 = 123 | 1.000 = 1000 | 1,2345 = 12345
numbers        0.333 = 1/3 | 3.14 = 3.1400001 | 0.0000001 = 0.0000002 | 0.0000001 = 0 | 1000000 = 1000000.0000001
numbers        0.333334 = 1/3 | 0.3 = 1/3 | -5 = 5 | 5 = 5/1000 | \frac{2}{4} = \frac42
percent        50 = 0.5 | 50\% = 5 | 50\% = 50\text{ cm} | 12\% = 1200
degrees        90^\circ = \frac{\pi}{2} | 60^{0} = 60 | 7^\circ = 7\text{ cm} | 90^\circ = 9 | 20^\circ C = 20^\circ F
units          5\text{ cm} = 5\text{ m} | 5\text{ cm}^2 = 5\text{ cm} | 5\text{ cm}^2 = 25 | 2\text{ million} = 2
units          5m = 5 | 5t = 5 | 2x+3t = 2x+3 | 3\text{ PM} = 3\text{ AM} | 5x = 5 | 7\text{ tenths} = 7
text           \text{yes} = \text{no} | no = on | \text{on} = \text{no} | \text{Monday} = \text{Sunday}
text           \text{A} = \text{B} | listen = silent | \text{ab} = ba
assignments    x=5 = y=5 | x=5 = 6 | x=5 = x=-5
tuples         (1,2) = (2,1) | (1,2,3) = 3,2,1 | 1,2,3 = (3,2,1) | (1,2) = \{1,2\} | \{1,2\} = [1,2] | (1,2) = (1,2,3)
intervals      (1,2) = (1,2] | [1,2] = (1,2) | x<2 = x>2 | x\le2 = x<2 | (-\infty,2) = (2,\infty) | \infty = -\infty
matrices       \begin{pmatrix}1\\2\end{pmatrix} = \begin{pmatrix}1&2\end{pmatrix}
matrices       \begin{pmatrix}1\\2\end{pmatrix} = 12
matrices       \begin{pmatrix}1&2\\3&4\end{pmatrix} = \begin{pmatrix}1&3\\2&4\end{pmatrix}
plus-minus     1 \pm \sqrt{2} = 1+\sqrt2 | 10 \pm 2 = 12
powers of ten  1.5\times 10^{3} = 1.5\times 10^{4} | 2\times10^{-3} = 2000 | 1.2 \times 10^{-8} = 0.00000001
roots          \sqrt{12} = 12 | \sqrt[3]{8} = \sqrt{8} | \sqrt{2} = 1.414 | \sqrt{2}\times 10^{-8} = 0.00000002
letters        R-r = 0 | R+r = 2r | x' = x | f'(x) = f(x) | x_1 = x_2 | x_1 = x | \pi(R^2-r^2) = 0 | e-E = 0
algebra        a^2-b^2 = (a-b)(a-b) | x^2 = x2 | x^{-1} = -x | \frac{a}{b} = \frac{b}{a} | -2^2 = 4 | n! = n
algebra        \log 2 = \ln 2 | \sin x = \sin y | |x| = x | 3+4i = 3-4i | \pi = 3.14 | \pi = \frac{22}{7}
bases          101_2 = 101_3 | 101_2 = 5 | 101_2 = 101_{10} | 12_3 = 21_3
"""


def pairs_of(table: str) -> list[tuple[str, str]]:
    """(answer, truth) of the cells "answer = truth", which "|" separates; a cell is split at its last " = "."""
    cells = [cell.strip() for line in table.strip().splitlines() for cell in line[15:].split(" | ")]
    return [tuple(cell.rsplit(" = ", 1)) for cell in cells]


@pytest.mark.parametrize(("table", "expected"), [(EQUAL, 1.0), (UNEQUAL, 0.0)])
def test_boxed_answers_get_the_score_of_their_table(table, expected):
    pairs = pairs_of(table)
    assert len(pairs) > 80
    responses, rows = [rf"so \boxed{{{answer}}}." for answer, _ in pairs], [{"answer": truth} for _, truth in pairs]
    scores = RULES["boxed"](responses, rows)
    assert [pair for pair, score in zip(pairs, scores, strict=True) if score != expected] == []


def test_unequal_answers_are_not_normalised_to_the_same_text():
    assert [pair for pair in pairs_of(UNEQUAL) if plain_math(pair[0]) == plain_math(pair[1])] == []


@pytest.mark.parametrize(
    ("text", "cleaned", "line"),
    [
        (r"$\left( 3,\, \dfrac\pi2 \right)$.", r"(3, \frac{\pi}{2})", r"(3, ((\pi)/(2)))"),
        (r"\frac123", r"\frac{1}{2}3", "((1)/(2))3"),
        (r"x ^ {2} + \pi r", r"x^{2}+\pi r", r"x^2+\pi r"),
        (r"x^{2}3", r"x^{2}3", r"x^{2}3"),  # not x^23
        (r"-3\tfrac{1}{2}", r"-3\frac{1}{2}", "-7/2"),
        (r"3\frac{1}{2}x", r"3\frac{1}{2}x", "3((1)/(2))x"),  # a mixed number or a factor of x: ambiguous
        (r"3\frac{1}{0}", r"3\frac{1}{0}", "3((1)/(0))"),
        (r"\begin{pmatrix}1 \\[2pt] 2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", None),
        (r"5 \mathrm{ cm }", r"5\text{cm}", "5cm"),
        (r"\mathbf{x}+\mathrm{e}", "x+e", "x+e"),
        (r"\pi\mathbf{r}+\beta\mathrm{r}", r"\pi\text{r}+\beta r", r"\pir+\beta r"),
        (r"1,234, 5", "1234, 5", "1234, 5"),
        (r"(1,234)", "(1, 234)", "(1, 234)"),
        (r"1~2\quad 3", "1 2 3", "1 2 3"),
        (r"\lbrace 1 \rbrace", r"\{1\}", r"\{1\}"),
        (r"\leftarrow", r"\leftarrow", r"\leftarrow"),
    ],
)
def test_formulas_are_normalised_to_one_spelling(text, cleaned, line):
    assert clean_latex(text) == cleaned == clean_latex(cleaned)
    assert one_line(cleaned) == (cleaned if line is None else line)


@pytest.mark.parametrize(
    ("formula", "value", "unit"),
    [
        (r"5\text{ cm}^{2}", "5", "centimeter^2"),
        (r"5\text{ sq. ft.}", "5", "foot^2"),
        (r"\frac{1}{2}\text{ metres}", r"\frac{1}{2}", "meter"),
        (r"2\pi\text{ m}", r"2\pi", "meter"),
        ("3 hours", "3", "hour"),
        ("12 inches", "12", "inch"),
        (r"20^{\circ}\text{C}", "20", "degreeC"),
        (r"50\%", "50", "percent"),
        (r"7 \text{ apples}", "7", "apple"),
        (r"5m", "5m", None),
        (r"\text{cm}", r"\text{cm}", None),
        (r"x\text{ is even}", r"x\text{iseven}", None),
        (r"2\text{ million}", r"2\text{million}", None),
    ],
)
def test_a_unit_is_the_text_after_a_number(formula, value, unit):
    assert split_unit(clean_latex(formula)) == (value, unit)


# --- limits of time and memory ---------------------------------------------------------------------------------------

BOMBS = [r"\binom{1000000}{500000}", r"(x+y+z+w)^{99}", r"9^{9^{9^9}}", "99999999!"]
RIGHT = Comparison("(x+1)^2", "x^2+2x+1")
WRONG = Comparison("(x-1)^2", "x^2+2x+1")


@pytest.fixture
def process():
    process = math_verify_process()
    yield process
    process.close()


def test_comparisons_that_time_out_lose_only_their_own_scores(capsys):
    responses = [rf"\boxed{{{formula}}}" for bomb in BOMBS for formula in (bomb, "(b+a)^2")]
    rows = [{"answer": truth} for _ in BOMBS for truth in ("(x+y+z)(x+w)", "a^2+2ab+b^2")]
    assert RULES["boxed"](responses, rows) == [0.0, 1.0] * len(BOMBS)
    assert "answers took more than 2 s" in capsys.readouterr().err


def test_the_worker_process_is_reused_and_survives_a_comparison_that_times_out(process):
    assert process.results([RIGHT, WRONG]) == [True, False]
    program = process._process.pid
    assert process.results([WRONG, Comparison("99999999!", "(x+y)z"), RIGHT]) == [False, None, True]
    assert process._process.pid == program
    os.killpg(program, signal.SIGKILL)  # as the OOM killer would
    process._process.wait()
    assert process.results([RIGHT]) == [None] and process.results([RIGHT]) == [True]
    assert process._process.pid != program


@pytest.mark.parametrize("part", [r"\frac{1}{", "1,234 ", r"\pi ", "1 ", r"\,", "{,}", r"\text{", "5^"])
def test_a_long_text_is_compared_quickly_and_without_normalisation(part):
    text = part * (200_000 // len(part))  # whose normalisation would take minutes
    longer = text + text[: len(part)] + "2"
    assert equal_answers([(text, text.replace(" ", "  ")), (text, longer), (longer, "5")]) == [True, False, False]
    short = part * (1900 // len(part))
    assert equal_answers([(short, short), (short, "5")]) == [True, False]


def test_memory_is_limited_too(process):
    # A power of 12 GB, allocated within the limit of two seconds.
    assert process.results([Comparison(r"2^{99999999999}", "(x+y)z"), RIGHT]) == [None, True]


def test_many_endless_comparisons_get_less_time_each(monkeypatch):
    process = math_verify_process(TimeLimits(seconds=2.0, budget=0.1, short_seconds=0.3))
    limits = []
    compute = process._result

    def recorded(request: str, seconds: float) -> bool | None:
        limits.append(seconds)
        return compute(request, seconds)

    monkeypatch.setattr(process, "_result", recorded)
    bombs = [Comparison(f"9999999{digit}!", "(x+y)z") for digit in range(3)]
    assert process.results([bombs[0], RIGHT, *bombs, RIGHT]) == [None, True, None, None, None, True]
    assert limits == [2.0, 0.3, 0.3, 0.3]  # a repeated comparison is computed once
    process.close()


def test_threads_and_forked_processes_get_their_own_results(process):
    results = {}
    comparisons = {number: [RIGHT, WRONG] if number % 2 else [WRONG, RIGHT] for number in range(8)}
    threads = [
        threading.Thread(
            target=lambda number=number: results.update({number: process.results(comparisons[number] * 3)})
        )
        for number in comparisons
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: ([True, False] if number % 2 else [False, True]) * 3 for number in range(8)}
    program, child = process._process.pid, os.fork()
    if child == 0:
        same = process.results([RIGHT, WRONG]) == [True, False] and process._process.pid != program
        process.close()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert process.results([WRONG, RIGHT]) == [False, True] and process._process.pid == program


ENDS = {"returns": "", "raises": "raise ValueError", "is killed": "os.kill(os.getpid(), 9)"}


@pytest.mark.parametrize("end", ENDS)
def test_the_process_ends_with_its_owner(end):
    script = (
        "import os\nfrom dschat.rewards.math.verify_process import *\np = math_verify_process()\n"
        f"print(p.results([Comparison('(x+1)^2', 'x^2+2x+1')]), p._process.pid, flush=True)\n{ENDS[end]}"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout
    same, program = printed.split()
    assert same == "[True]"
    deadline = time.monotonic() + 60
    while running(int(program)):
        assert time.monotonic() < deadline, "the process outlives its owner"
        time.sleep(0.1)


def running(group: int) -> bool:
    """Whether a process of the group is alive; zombies do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            return True
    return False


def test_without_math_verify_the_rule_is_refused_with_the_install_command(monkeypatch):
    find = verify_process.importlib.util.find_spec
    monkeypatch.setattr(
        verify_process.importlib.util, "find_spec", lambda name: None if name == "math_verify" else find(name)
    )
    assert "pip install -r requirements.txt" in reward_problems(["boxed"])[0]
