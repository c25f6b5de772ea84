"""Whole steps of every objective: padding, shared prompts, the token budget, ranks and ZeRO stages change nothing."""

from pathlib import Path

import numpy as np
import pytest
import step_equality_ranks
import torch
from rlhf_models import save_models

OBJECTIVES = ["sft", "packed sft", "reward", "dpo", "kto", "ppo", "grpo"]
SCRIPT = Path(__file__).with_name("step_equality_ranks.py")


@pytest.fixture(scope="module")
def results(programs, tmp_path_factory) -> dict[int, dict]:
    """By number of ranks: (option, objective, way) → metrics and gradients."""
    folder = save_models(tmp_path_factory.mktemp("models"))
    for ranks in step_equality_ranks.OF_RANKS:
        programs.run(SCRIPT, [folder], processes=ranks, log=folder / f"{ranks}.log")
    return {ranks: torch.load(folder / f"{ranks}.pt") for ranks in step_equality_ranks.OF_RANKS}


def assert_equal_steps(actual, expected, case) -> None:
    """float32: gradients within 1e-5 of the parameter's largest, of the median parameter's where they cancel."""
    (metrics, gradients), (expected_metrics, expected_gradients) = actual, expected
    assert metrics.keys() == expected_metrics.keys(), case
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=2e-5, abs=2e-6), (case, name)
    assert gradients.keys() == expected_gradients.keys(), case
    sizes = {name: float(gradient.abs().max()) for name, gradient in expected_gradients.items()}
    typical = float(np.median(list(sizes.values())))
    assert typical > 1e-4, case
    for name, gradient in expected_gradients.items():
        error = float((gradients[name] - gradient).abs().max())
        assert error <= 1e-5 * max(sizes[name], typical), (case, name, error / max(sizes[name], typical))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("ranks", step_equality_ranks.OF_RANKS)
def test_a_step_is_that_of_padded_rows_one_at_a_time(ranks, objective, results):
    for option in step_equality_ranks.OF_RANKS[ranks]:
        expected = results[1]["reference", "lora" if "lora" in option else "full", objective]
        for way in step_equality_ranks.WAYS:
            assert_equal_steps(results[ranks][option, objective, way], expected, (ranks, option, way))
