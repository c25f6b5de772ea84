"""The example of a reward function scores answers and calculations as documented."""

import importlib.util

import pytest
from repository import TRAINING

PATH = TRAINING / "step3_rlhf_finetuning" / "example_rewards.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_rewards", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("4 + 3 = 7", [True]),
        ("4 + 3 = 8, then 8 * 2 = 16", [False, True]),
        ("1,000 - 1 = 999 and 7 / 2 = 3.5", [True, True]),
        ("2 - 5 = -3 and -3 + 1 = -2", [True, True]),
        ("6 × 7 = 42; 6 x 7 = 41; 8 ÷ 2 = 4; 8 − 2 = 6", [True, False, True, True]),
        ("5 / 0 = 0", [False]),
        ("the sum is 7", []),
        ("3 = 1 + 2", []),
    ],
)
def test_each_written_calculation_is_checked_exactly(example, response, correct):
    assert example.correct_steps(response) == correct


def test_an_intermediate_result_of_a_chain_is_not_taken_for_the_end_of_a_calculation(example):
    """2 + 3 = 5 - 1 = 4 states nothing about 2 + 3 = 4; its second equation, 5 - 1 = 4, holds."""
    assert example.correct_steps("2 + 3 = 5 - 1 = 4") == [True]


def test_the_score_is_the_answer_plus_the_weighted_share_of_correct_steps(example):
    responses = ["2 + 2 = 4\n4 + 1 = 6\nSo it is 5.", "It is 5.", "2 + 3 = 5\nNo, 6."]
    scores = example.worked_answer(responses, [{"answer": "5"}] * 3, calculations=0.5)
    assert scores == [1 + 0.5 * 0.5, 1.0, 0.5]


def test_a_row_without_a_number_gives_no_score(example):
    assert example.worked_answer(["5", "5"], [{}, {"answer": "five"}]) == [None, None]
