"""Critic-free advantages, penalties and the KL coefficient: by hand, and against loops over plain lists."""

import math
import random
from fractions import Fraction

import pytest
import torch

from dschat.rlhf.advantages import (
    adapted_kl_coef,
    overlong_penalty,
    reinforce,
    returns_to_go,
    summed_rewards,
    token_rewards,
)
from dschat.rlhf.group_advantages import dr_grpo, group_mean, grpo, opo, rloo

NAN = float("nan")
ESTIMATORS = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "opo": opo}


def mask_of(*rows: str) -> torch.Tensor:
    return torch.tensor([[c == "1" for c in row] for row in rows])


# Two prompts with three responses each, of 3, 1, 2 and 2, 2, 4 tokens, with holes.
# Whole rewards: 1 + 2 + 3 = 6, 0, −4 + 1 = −3 and 1, 1, 4.
MASK = mask_of("1110", "0100", "1010", "0011", "1001", "1111")
REWARDS = torch.tensor([
    [1.0, 2.0, 3.0, NAN], [NAN, 0.0, NAN, NAN], [-4.0, NAN, 1.0, NAN],
    [NAN, NAN, 0.5, 0.5], [0.0, NAN, NAN, 1.0], [1.0, 1.0, 1.0, 1.0],
])  # fmt: skip
BY_HAND = {
    # means 1 and 2; unbiased deviations √((25 + 1 + 16) / 2) = √21 and √((1 + 1 + 4) / 2) = √3
    "grpo": [5 / 21**0.5, -1 / 21**0.5, -4 / 21**0.5, -1 / 3**0.5, -1 / 3**0.5, 2 / 3**0.5],
    "dr_grpo": [5.0, -1, -4, -1, -1, 2],
    # 6 − (0 − 3) / 2, 0 − (6 − 3) / 2, −3 − (6 + 0) / 2;  1 − (1 + 4) / 2 twice, 4 − (1 + 1) / 2
    "rloo": [7.5, -1.5, -6, -1.5, -1.5, 3],
    # baselines (3·6 + 1·0 − 2·3) / 6 = 2 and (2·1 + 2·1 + 4·4) / 8 = 2.5
    "opo": [4.0, -2, -5, -1.5, -1.5, 1.5],
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_group_advantages_by_hand(name):
    found = ESTIMATORS[name](REWARDS, MASK, group_size=3)
    # grpo divides by a deviation that is 1e-6 larger.
    torch.testing.assert_close(found, torch.tensor(BY_HAND[name])[:, None] * MASK, atol=1e-5, rtol=1e-5)
    assert found.dtype == torch.float32


def test_rounding_differences_within_a_group_are_not_amplified():
    # 0 and 2e-6: ∓1e-6 from the mean, deviation √2·1e-6: 1 / (√2 + 1)
    rewards = torch.tensor([[0.0], [2e-6]], dtype=torch.float64)
    found = grpo(rewards, torch.ones(2, 1).bool(), group_size=2)
    torch.testing.assert_close(found, torch.tensor([[-1.0], [1.0]], dtype=torch.float64) / (2**0.5 + 1))


def in_plain_words(name: str, rewards: list[Fraction], lengths: list[int]) -> list[float]:
    """A group's advantages in exact fractions, one response after the other."""
    found = []
    for i, own in enumerate(rewards):
        others = [reward for j, reward in enumerate(rewards) if j != i]
        if not others:
            return [0.0]
        mean = sum(rewards) / len(rewards)
        if name == "rloo":
            found.append(float(own - sum(others) / len(others)))
        elif name == "opo":
            found.append(float(own - sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)))
        elif name == "dr_grpo":
            found.append(float(own - mean))
        else:
            variance = sum((reward - mean) ** 2 for reward in rewards) / len(others)
            found.append(float(own - mean) / (math.sqrt(variance) + 1e-6))
    return found


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_group_advantages_equal_exact_fractions_and_missing_scores_are_as_if_never_sampled(name, missing):
    random.seed(7)
    for size in (2, 3, 5):
        count = 4 * size
        mask = torch.tensor([[random.random() < 0.6 for _ in range(6)] for _ in range(count)])
        mask[:, 0] = True
        rewards = torch.tensor([[random.randint(-64, 64) / 8 for _ in range(6)] for _ in range(count)])
        has_score = torch.tensor([not missing or random.random() < 0.6 for _ in range(count)])
        assert not missing or not has_score.all()
        rewards[~has_score] = 1e9  # arbitrary values
        found = ESTIMATORS[name](
            rewards.masked_fill(~mask, NAN), mask, group_size=size, has_score=has_score if missing else None
        )
        expected = torch.zeros(count, 6)
        for first in range(0, count, size):
            rows = [i for i in range(first, first + size) if has_score[i]]
            whole = [sum(Fraction(float(rewards[i, t])) for t in range(6) if mask[i, t]) for i in rows]
            values = in_plain_words(name, whole, [int(mask[i].sum()) for i in rows])
            for i, value in zip(rows, values, strict=True):
                expected[i, mask[i]] = value
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("size", [3, 7, 8, 16])
def test_a_group_of_equal_rewards_has_zero_advantages(name, size):
    """Their float32 mean is off by a rounding: grpo would make advantages of 0.3 of it."""
    for reward in (0.1, 3.3, 4.7, -123.456):
        rewards = torch.zeros(size, 2)
        rewards[:, 1] = reward
        found = ESTIMATORS[name](rewards, torch.ones(size, 2).bool(), group_size=size)
        assert found.abs().max() < 1e-6


@pytest.mark.parametrize("name", ESTIMATORS)
def test_group_advantages_do_not_depend_on_other_groups_or_padding(name):
    estimator = ESTIMATORS[name]
    whole = estimator(REWARDS, MASK, group_size=3)
    assert torch.equal(whole[3:], estimator(REWARDS[3:], MASK[3:], group_size=3))
    pad = torch.nn.functional.pad
    assert torch.equal(estimator(pad(REWARDS, (2, 3), value=NAN), pad(MASK, (2, 3)), group_size=3), pad(whole, (2, 3)))
    one = torch.tensor([[0.5], [2.0], [-1.0]])
    alone = torch.ones(3, 1).bool()
    torch.testing.assert_close(estimator(one + 4, alone, group_size=3), estimator(one, alone, group_size=3))


@pytest.mark.parametrize("name", ["dr_grpo", "rloo"])
def test_advantages_of_a_group_sum_to_zero(name):
    per_response = ESTIMATORS[name](REWARDS, MASK, group_size=3).sum(-1) / MASK.sum(-1)
    torch.testing.assert_close(per_response.view(2, 3).sum(-1), torch.zeros(2))


@pytest.mark.parametrize("estimator", [*ESTIMATORS.values(), group_mean])
def test_incomplete_groups_are_refused(estimator):
    for size in (1, 4):
        with pytest.raises(ValueError, match=f"6 responses in groups of {size}.*at least 2"):
            estimator(REWARDS, MASK, group_size=size)
    with pytest.raises(ValueError, match=r"mask.bool\(\)"):
        estimator(REWARDS, MASK.long(), group_size=3)
    with pytest.raises(ValueError, match=r"rewards has shape \(6, 3\)"):
        estimator(REWARDS[:, 1:], MASK, group_size=3)
    with pytest.raises(ValueError, match=r"mask has \(5,\)"):
        estimator(REWARDS, MASK, group_size=3, has_score=torch.ones(5).bool())


def test_whole_rewards_and_group_means_by_hand():
    torch.testing.assert_close(summed_rewards(REWARDS, MASK), torch.tensor([6.0, 0, -3, 1, 1, 4]))
    torch.testing.assert_close(group_mean(REWARDS, MASK, group_size=3), torch.tensor([1.0, 1, 1, 2, 2, 2]))
    has_score = torch.tensor([True, True, False, False, False, False])  # (6 + 0) / 2; nothing at all
    means = group_mean(REWARDS, MASK, group_size=3, has_score=has_score)
    torch.testing.assert_close(means, torch.tensor([3.0, 3, 3, 0, 0, 0]))


def test_returns_skip_masked_positions():
    # γ = 1/2: 3; 2 + 3/2; 1 + 3.5/2.  With a hole in the middle: 1; −4 + 1/2
    rewards, mask = REWARDS[[0, 2]], MASK[[0, 2]]
    expected = torch.tensor([[2.75, 3.5, 3.0, 0.0], [-3.5, 0.0, 1.0, 0.0]])
    torch.testing.assert_close(returns_to_go(rewards, mask, gamma=0.5), expected)
    torch.testing.assert_close(reinforce(rewards, mask, gamma=0.5), expected)
    # Less 1/4, 1/2 and 1 times 0.75; less 1/2 and 1 times −1.5
    baseline = torch.tensor([0.75, -1.5])
    less = torch.tensor([[2.5625, 3.125, 2.25, 0.0], [-2.75, 0.0, 2.5, 0.0]])
    torch.testing.assert_close(reinforce(rewards, mask, gamma=0.5, baseline=baseline), less)
    undiscounted = torch.tensor([[6.0 - 0.75, 5.0 - 0.75, 3.0 - 0.75, 0.0], [-3.0 + 1.5, 0.0, 1.0 + 1.5, 0.0]])
    torch.testing.assert_close(reinforce(rewards, mask, gamma=1.0, baseline=baseline), undiscounted)
    # At γ = 0 a token has its own reward alone, and the baseline is the last one's
    own = torch.tensor([[1.0, 2.0, 2.25, 0.0], [-4.0, 0.0, 2.5, 0.0]])
    torch.testing.assert_close(reinforce(rewards, mask, gamma=0.0, baseline=baseline), own)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 1.0])
def test_advantages_are_zero_at_the_baseline_and_positive_everywhere_above_it(gamma):
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    scores = torch.tensor([2.0, -3.0, 0.5, 1.0])
    rewards = token_rewards(scores, torch.zeros(4, 5), mask, kl_coef=0.0)
    assert not reinforce(rewards, mask, gamma=gamma, baseline=scores).any()
    for offset in (-1.0, 1.0):
        advantages = reinforce(rewards, mask, gamma=gamma, baseline=scores + offset)
        assert (-offset * advantages >= 0).all() and not advantages[~mask].any()
        assert (advantages[mask] != 0).all() or gamma == 0


@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_returns_are_discounted_sums_over_the_tokens_that_follow(gamma):
    torch.manual_seed(0)
    rewards, mask = torch.randn(5, 7, dtype=torch.float64), torch.rand(5, 7) < 0.7
    found = returns_to_go(rewards.masked_fill(~mask, NAN), mask, gamma=gamma)
    for i in range(5):
        tokens = [t for t in range(7) if mask[i, t]]
        for place, t in enumerate(tokens):
            expected = sum(gamma**later * rewards[i, u] for later, u in enumerate(tokens[place:]))
            torch.testing.assert_close(found[i, t], torch.as_tensor(expected))
    assert not found[~mask].any()


def test_reinforce_refuses_wrong_shapes_and_discounts():
    with pytest.raises(ValueError, match=r"baseline has shape \(6, 4\)"):
        reinforce(REWARDS, MASK, gamma=1.0, baseline=REWARDS)
    with pytest.raises(ValueError, match="gamma is 1.5"):
        reinforce(REWARDS, MASK, gamma=1.5)


def test_advantages_have_no_graph_and_at_least_float32():
    rewards = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(2, 3).bool()
    for name, estimator in ESTIMATORS.items():
        found = estimator(rewards, mask, group_size=2)
        assert found.dtype == torch.float32 and not found.requires_grad, name
        assert estimator(rewards.double(), mask, group_size=2).dtype == torch.float64, name
    baseline = group_mean(rewards, mask, group_size=2)
    assert baseline.dtype == reinforce(rewards, mask, gamma=1.0, baseline=baseline).dtype == torch.float32


def test_the_overlong_penalty_grows_linearly_over_the_buffer():
    # L = 10, B = 4, factor 2: free up to 6, then −2/4 a token, −2 from 10 on
    lengths = torch.tensor([1, 6, 7, 8, 10, 12])
    found = overlong_penalty(lengths, max_tokens=10, buffer=4, factor=2.0)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, -0.5, -1.0, -2.0, -2.0]))
    torch.testing.assert_close(
        overlong_penalty(torch.tensor([0, 5, 10]), max_tokens=10, buffer=10, factor=1.0), torch.tensor([0.0, -0.5, -1])
    )
    for buffer in (0, 11):
        with pytest.raises(ValueError, match=f"buffer={buffer}: .*1 to 10"):
            overlong_penalty(lengths, max_tokens=10, buffer=buffer, factor=1.0)


def test_the_kl_coefficient_adapts_towards_the_target():
    def adapted(kl: float, responses: int = 50) -> float:
        return adapted_kl_coef(0.5, kl, target=6.0, horizon=100.0, responses=responses)

    # 0.5 · (1 + clip(KL/6 − 1, ±0.2) · 50/100)
    assert adapted(6.0) == 0.5
    assert adapted(6.6) == pytest.approx(0.525) and adapted(5.4) == pytest.approx(0.475)  # ± 0.1
    assert adapted(60.0) == pytest.approx(0.55) and adapted(-3.0) == pytest.approx(0.45)  # ± 0.2, clipped
    assert adapted(0.0, responses=10**6) == pytest.approx(0.4), "a price stays a price, however large an iteration"
