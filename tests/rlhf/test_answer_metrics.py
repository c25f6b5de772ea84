"""Answer extraction, pass@k and majority vote, against hand counts and brute force."""

from fractions import Fraction
from itertools import combinations

import pytest

from dschat.rewards.answer_extraction import exact_number, extract_answer, last_boxed, last_number
from dschat.rlhf.answer_metrics import majority, pass_at_k


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 5.", "5"),
        ("First 3, then 1,234,567.50 dollars", "1234567.5"),
        ("17-4", "4"),  # a difference, not minus four
        ("5 - 3", "3"),
        ("x=-3", "-3"),
        ("(-2)", "-2"),
        ("\u22127 degrees", "-7"),  # the sign that typographers set
        ("+4", "4"),
        ("-3/4", "-3/4"),
        ("3/4/2024", "2024"),
        ("1/0", "0"),  # no fraction: two numbers
        ("1,2345", "2345"),  # no thousands: two numbers
        (".5", "1/2"),
        ("2.5e-3", "1/400"),
        ("1.5/2", "3/4"),
        ("007", "7"),
        ("9" * 5000 + " or 7", "7"),  # Python would refuse to read the first
        ("1e999999999", "999999999"),  # an exponent of three digits at most
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == Fraction(number)


@pytest.mark.parametrize("text", ["", "none", "a-b", ".", "-", "," * 50])
def test_a_text_without_a_number_has_none(text):
    assert last_number(text) is None and extract_answer(text, "last_number") is None


def test_only_a_text_that_is_a_number_as_a_whole_has_a_value():
    assert exact_number("1,000") == exact_number(1000) == exact_number(1000.0) == 1000
    assert exact_number(0.1) == Fraction(1, 10) and exact_number(" -2.5 ") == Fraction(-5, 2)
    for value in ("5 apples", "", "x", True, None, [5], float("nan"), float("inf")):
        assert exact_number(value) is None


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),  # braces of a set are text
        (r"\boxed{7} and \boxed{8", "7"),  # the last one is not closed
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"\boxed {3}", "3"),
        (r"\boxed{}", ""),
        ("no box } } {", None),
        (r"\boxed 5", None),
    ],
)
def test_the_last_box_and_its_braces(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("how", "alike", "other"),
    [
        ("last_number", ["It is 1,000.", "1000.0", "= 2000/2"], "999"),
        ("boxed", [r"\boxed{\frac{3}{4}}", r"\boxed{$0.75$}", r"\boxed{\text{ }3/4}"], r"\boxed{4/3}"),
        ("boxed", [r"\boxed{0}", r"\boxed{0.0}", r"\boxed{-0}"], r"\boxed{1}"),
        ("boxed", [r"\boxed{x + 1}", r"\boxed{ x+1 }"], r"\boxed{x - 1}"),
        ("boxed", [r"\boxed{\frac{1}{\frac{2}{3}}}"], r"\boxed{\frac{\frac{1}{2}}{3}}"),  # 3/2 and 1/6
        ("boxed", [r"\boxed{2\frac{1}{2}}"], r"\boxed{\frac{21}{2}}"),
        ("tag", ["<answer>No</answer> <answer> Yes\n</answer>", "<answer>yes</answer>"], "<answer>no</answer>"),
        ("text", ["Yes  it\nis", " yes it is "], "yes"),
    ],
)
def test_equivalent_answers_are_normalised_to_the_same_text(how, alike, other):
    texts = {extract_answer(text, how) for text in alike}
    assert len(texts) == 1 and None not in texts
    assert extract_answer(other, how) not in texts | {None}


@pytest.mark.parametrize(
    ("how", "text"), [("boxed", "5"), ("tag", "<answer>5"), ("tag", "<answer> </answer>"), ("text", " ")]
)
def test_no_answer_is_none(how, text):
    assert extract_answer(text, how) is None


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_of_large_counts_is_finite_and_exact():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)  # by symmetry: drawn or left behind
    assert pass_at_k(200, 3, 1) == pytest.approx(3 / 200)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match="correct <= samples"):
        pass_at_k(n, c, k)


def test_the_majority_counts_answers_and_takes_the_earlier_of_equals():
    assert majority(["a", "b", "b", None, None, None]) == 1
    assert majority(["b", "a", "a", "b"]) == 0
    assert majority([None, "c"]) == 1
    assert majority([None, None]) is majority([]) is None
