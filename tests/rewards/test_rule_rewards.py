"""Rule-based rewards against values computed by hand."""

import importlib.util
import re
from pathlib import Path

import pytest

from dschat.rewards.rules import RULES

ROOT = Path(__file__).parents[2]


def scored(rule: str, responses: list[str], truths: list | None = None, **options) -> list[float | None]:
    return RULES[rule](responses, [{"answer": truth} for truth in truths or [None] * len(responses)], **options)


def test_exact_ignores_white_space_and_by_default_case():
    responses, truths = [" the  Answer\n", "the answer.", "12", "x"], ["The answer", "the answer", 12, None]
    assert scored("exact", responses, truths) == [1.0, 0.0, 1.0, None]
    assert scored("exact", responses, truths, case=True) == [0.0, 0.0, 1.0, None]
    assert RULES["exact"](["a"], [{"truth": "a"}], column="truth") == [1.0]
    assert RULES["exact"](["a"], [{"truth": "a"}]) == [None]  # no such column: no score


def test_numbers_are_compared_by_value():
    truth = [1000, "1,000", "so 7 - 3 = 4 #### 1000", 0.75, "-2", 1e-7, 10]
    responses = ["It is 1,000.00!", "1e3", "= 1000", "3/4", "2", "0.0000001", "nothing"]
    assert scored("last_number", responses, truth) == [1, 1, 1, 1, 0, 1, 0]
    assert scored("last_number", ["3.14", "3.15"], [3.14159] * 2, tolerance=0.005) == [1, 0]
    with pytest.raises(ValueError, match="column answer contains 'many'"):
        scored("last_number", ["5"], ["many"])
    with pytest.raises(ValueError, match="tolerance=-1"):
        scored("last_number", [], tolerance=-1.0)


def test_only_boxed_answers_count():
    truth = r"Thus \boxed{\frac{1}{2}}"
    responses = [r"\boxed{3} \boxed{0.5}", r"\boxed{\dfrac{1}{2}}", "0.5", r"\boxed{2}", r"\boxed{1/2"]
    assert scored("boxed", responses, [truth] * 5) == [1, 1, 0, 0, 0]
    assert scored("boxed", [r"\boxed{12}", r"\boxed{x}"], [12, None]) == [1, None]


def test_mathematically_equal_formulas_are_equal():
    responses = [r"\boxed{(x+1)^2}", r"\boxed{\sqrt{8}}", r"\boxed{(x-1)^2}", r"\boxed{\{2, 1\}}"]
    assert scored("boxed", responses, ["x^2+2x+1", r"2\sqrt{2}", "x^2+2x+1", r"\{1,2\}"]) == [1, 1, 0, 1]


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("So <think>a</think>\n and <answer>b</answer> .", 1),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("a</think><answer>b</answer>", 0),
    ],
)
def test_tags_must_come_once_each_and_in_order(response, score):
    assert RULES["format"]([response]) == [score]


def test_tags_are_chosen_by_name():
    assert RULES["format"](["<plan>a</plan>"], tags="plan") == [1]
    for tags in ("", "a,,b", "<a>"):
        with pytest.raises(ValueError, match="separated by commas"):
            RULES["format"]([], tags=tags)


def test_length_falls_linearly_on_both_sides_of_a_target_and_beyond_a_limit():
    counts = [0, 5, 10, 12, 20, 30]
    token_ids = [[7] * count for count in counts]
    assert RULES["length"](token_ids, target=10) == pytest.approx([0, 0.5, 1, 0.8, 0, 0])
    assert RULES["length"](token_ids, max=10) == pytest.approx([1, 1, 1, 0.8, 0, 0])
    for options in ({}, {"target": 5, "max": 5}, {"max": -1}):
        with pytest.raises(ValueError, match="one of target=TOKENS and max=TOKENS"):
            RULES["length"](token_ids, **options)


def test_repetition_is_minus_the_share_of_repeated_n_grams():
    # "a b a b a": ab, ba, ab, ba: 2 of 4 are new; as words 2 of 5; trigrams aba, bab, aba: 2 of 3.
    assert RULES["repetition"](["A b a B a"], ngram=2) == pytest.approx([-1 / 2])
    assert RULES["repetition"](["a b a b a"], ngram=1) == pytest.approx([-3 / 5])
    assert RULES["repetition"](["a b a b a", "a b c d", "a b", ""]) == pytest.approx([-1 / 3, 0, 0, 0])
    with pytest.raises(ValueError, match="ngram=0"):
        RULES["repetition"]([], ngram=0)


def test_overlong_is_dapos_equation_13():
    def equation(length: int, longest: int, cache: int) -> float:
        if length <= longest - cache:
            return 0.0
        return ((longest - cache) - length) / cache if length <= longest else -1.0

    token_ids = [[1] * length for length in range(0, 25)]
    for factor in (1.0, 0.5):
        actual = RULES["overlong"](token_ids, 20, buffer=8, factor=factor)
        assert actual == pytest.approx([factor * equation(length, 20, 8) for length in range(0, 25)])
    assert actual[12] == 0 and actual[16] == pytest.approx(-0.25) and actual[24] == pytest.approx(-0.5)
    for buffer in (0, 21, -1):
        with pytest.raises(ValueError, match="1 to 20"):
            RULES["overlong"](token_ids, 20, buffer=buffer)
    with pytest.raises(ValueError, match="factor=0"):
        RULES["overlong"](token_ids, 20, buffer=8, factor=0)


def test_without_reasoning_gym_the_rule_is_refused_with_the_remedy(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "reasoning_gym" else find_spec(name))
    with pytest.raises(ImportError, match=r"pip install -e '.\[reasoning\]'"):
        RULES["reasoning_gym"](["p"], ["r"], [{}])


def test_the_readme_of_step_3_lists_every_rule():
    text = (ROOT / "training" / "step3_rlhf_finetuning" / "README.md").read_text(encoding="utf-8")
    for rule in RULES:
        assert re.search(rf"^\| `{rule}[?`]", text, re.MULTILINE), rule
