"""KL estimators, token rewards and GAE against hand arithmetic, exact expectations and a loop over unpadded rows."""

import math

import pytest
import torch

from dschat.rlhf.advantages import KL_ESTIMATORS, gae, kl_estimate, token_rewards

NAN, INF = float("nan"), float("inf")


def ragged_mask() -> torch.Tensor:
    """Rows: full, short, with a hole, masked at both ends and inside, one token, empty."""
    rows = ["111111", "111000", "110011", "010110", "000100", "000000"]
    return torch.tensor([[c == "1" for c in row] for row in rows])


# --- KL --------------------------------------------------------------------------------------------------------------


def test_kl_estimates_by_hand():
    # Δ = ln 0.5 − ln 0.25 = ln 2 = 0.6931: k1 0.6931, k2 0.2402, k3 = 1/2 − 1 + 0.6931 = 0.1931
    # Δ = ln 0.1 − ln 0.4 = −ln 4 = −1.3863: k1 −1.3863, k2 0.9609, k3 = 4 − 1 − 1.3863 = 1.6137
    logprobs = torch.tensor([[0.5, 0.1]]).log()
    ref_logprobs = torch.tensor([[0.25, 0.4]]).log()
    expected = {"k1": [0.6931472, -1.3862944], "k2": [0.2402265, 0.9609060], "k3": [0.1931472, 1.6137056]}
    for estimator, values in expected.items():
        torch.testing.assert_close(kl_estimate(logprobs, ref_logprobs, estimator), torch.tensor([values]))


def test_k1_and_k3_have_the_exact_kl_as_expectation_and_k2_half_the_mean_square():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    q = torch.tensor([0.2, 0.4, 0.1, 0.3], dtype=torch.float64)
    exact = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    square = sum(a * math.log(a / b) ** 2 / 2 for a, b in zip(p.tolist(), q.tolist(), strict=True))
    for estimator, expectation in (("k1", exact), ("k3", exact), ("k2", square)):
        estimates = kl_estimate(p.log()[None], q.log()[None], estimator)[0]
        assert (p * estimates).sum().item() == pytest.approx(expectation, abs=1e-12)


def test_k3_estimates_the_kl_from_the_sampling_policy_and_not_the_reverse():
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    forward = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert (p * kl_estimate(p.log(), q.log(), "k3")).sum().item() == pytest.approx(forward, rel=1e-5)
    assert (p * kl_estimate(q.log(), p.log(), "k3")).sum().item() != pytest.approx(forward, rel=1e-2)


def test_k3_is_precise_and_positive_at_small_differences():
    # k3 = Δ²/2 − Δ³/6 + …: 4.99998e-9 at Δ = 1e-4, which a float32 sum with 1 loses entirely.
    estimate = kl_estimate(torch.tensor([[1e-4, -1e-4]]), torch.zeros(1, 2), "k3")
    torch.testing.assert_close(estimate, torch.tensor([[5e-9, 5e-9]]), rtol=2e-3, atol=0)


def test_k3_and_its_gradient_are_finite_for_policies_far_apart():
    logprobs = torch.tensor([[-300.0, 0.0]], requires_grad=True)
    ref_logprobs = torch.tensor([[0.0, -300.0]])
    estimate = kl_estimate(logprobs, ref_logprobs, "k3")
    # Δ = −300: e^20 − 1 − 300.  Δ = 300: e^−20 − 1 + 300.
    torch.testing.assert_close(estimate, torch.tensor([[math.expm1(20.0) - 300.0, 299.0]]))
    estimate.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.ones(1, 2))


def test_clip_bounds_k3_and_its_gradient_but_not_the_gradient_of_k3_plus():
    # Δ = −12, −2, 3: k3 = e^12 − 13 = 162741.79, e^2 − 3 = 4.389, e^−3 + 2 = 2.0498; d k3 = 1 − e^−Δ, d k3+ = Δ
    deltas = [-12.0, -2.0, 3.0]
    plain = [math.exp(12) - 13, math.exp(2) - 3, math.exp(-3) + 2]
    slopes = {"k3": [0.0, 1 - math.exp(2), 1 - math.exp(-3)], "k3+": deltas, "k1": [1.0] * 3, "k2": deltas}
    values = {"k3": [10.0, *plain[1:]], "k3+": [10.0, *plain[1:]], "k1": deltas, "k2": [72.0, 2.0, 4.5]}
    for estimator in KL_ESTIMATORS:
        logprobs = torch.tensor([deltas], dtype=torch.float64, requires_grad=True)
        estimate = kl_estimate(logprobs, torch.zeros(1, 3), estimator, clip=10.0)
        assert estimate[0].tolist() == pytest.approx(values[estimator]), estimator
        (gradient,) = torch.autograd.grad(estimate.sum(), logprobs)
        assert gradient[0].tolist() == pytest.approx(slopes[estimator]), estimator
    assert kl_estimate(torch.tensor([deltas]), torch.zeros(1, 3), "k3")[0].tolist() == pytest.approx(plain)
    with pytest.raises(ValueError, match="clip is 0 nats"):
        kl_estimate(torch.zeros(1, 2), torch.zeros(1, 2), "k3", clip=0)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_gradients_reach_the_actor_with_the_right_sign(estimator):
    logprobs = torch.tensor([[0.5, 0.1]]).log().requires_grad_()
    kl_estimate(logprobs, torch.tensor([[0.25, 0.4]]).log(), estimator).sum().backward()
    # d k1 = 1, d k2 = Δ, d k3 = 1 − e^−Δ, with Δ = ln 2 and −ln 4
    expected = {"k1": [1.0, 1.0], "k2": [0.6931472, -1.3862944], "k3": [0.5, -3.0], "k3+": [0.6931472, -1.3862944]}
    torch.testing.assert_close(logprobs.grad, torch.tensor([expected[estimator]]))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_at_masked_positions_is_zero_without_gradient(estimator):
    logprobs = torch.tensor([[-1.0, NAN, -INF, INF]], requires_grad=True)
    mask = torch.tensor([[True, False, False, False]])
    estimate = kl_estimate(logprobs, torch.tensor([[-2.0, -1.0, -INF, 0.0]]), estimator, response_mask=mask)
    assert estimate[0, 0] != 0 and (estimate[0, 1:] == 0).all()
    estimate.sum().backward()
    assert logprobs.grad[0, 0] != 0 and (logprobs.grad[0, 1:] == 0).all()


def test_kl_is_float32_for_half_precision_inputs():
    estimate = kl_estimate(torch.full((1, 1), -1.0).bfloat16(), torch.full((1, 1), -1.0078125).bfloat16(), "k2")
    assert estimate.dtype == torch.float32
    assert estimate.item() == pytest.approx(0.0078125**2 / 2)


def test_an_unknown_estimator_and_different_shapes_are_refused():
    with pytest.raises(ValueError, match='"k4".*k1, k2, k3'):
        kl_estimate(torch.zeros(1, 2), torch.zeros(1, 2), "k4")
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 1\)"):
        kl_estimate(torch.zeros(1, 2), torch.zeros(1, 1), "k1")
    with pytest.raises(ValueError, match="bool"):
        kl_estimate(torch.zeros(1, 2), torch.zeros(1, 2), "k1", response_mask=torch.ones(1, 2))


# --- rewards ---------------------------------------------------------------------------------------------------------


def test_token_rewards_by_hand():
    kl = torch.tensor([[1.0, -2.0, 0.5], [3.0, NAN, 1.0], [NAN, INF, -INF]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    rewards = token_rewards(torch.tensor([7.0, -4.0, NAN]), kl, mask, kl_coef=0.1)
    # −0.1·1, +0.1·2, 7 − 0.1·0.5; −4 − 0.1·3 on the only token; nothing in the empty row
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.2, 6.95], [-4.3, 0.0, 0.0], [0.0, 0.0, 0.0]]))


def test_the_score_is_added_at_the_last_response_token_also_with_holes():
    mask = ragged_mask()
    scores = torch.arange(1.0, 7.0)
    rewards = token_rewards(scores, torch.zeros(6, 6), mask, kl_coef=0.3)
    for row, flags, score in zip(rewards.tolist(), mask.tolist(), scores.tolist(), strict=True):
        last = max((t for t in range(6) if flags[t]), default=None)
        assert row == [score if t == last else 0.0 for t in range(6)]


def test_rewards_of_no_columns_are_empty():
    assert token_rewards(torch.ones(2), torch.zeros(2, 0), torch.zeros(2, 0).bool(), kl_coef=1.0).shape == (2, 0)


def test_token_rewards_are_float32_without_a_graph():
    kl = torch.full((1, 2), 3.0, dtype=torch.bfloat16, requires_grad=True)
    rewards = token_rewards(torch.full((1,), 0.75).bfloat16(), kl, torch.ones(1, 2).bool(), kl_coef=0.1)
    assert rewards.dtype == torch.float32 and not rewards.requires_grad
    torch.testing.assert_close(rewards, torch.tensor([[-0.3, 0.45]]))


def test_wrong_reward_inputs_are_refused():
    kl, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match=r"scores has shape \(3,\)"):
        token_rewards(torch.zeros(3), kl, mask, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"scores has shape \(2, 3\)"):
        token_rewards(kl, kl, mask, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"kl has shape \(2, 1\)"):
        token_rewards(torch.zeros(2), kl[:, :1], mask, kl_coef=0.1)


# --- GAE -------------------------------------------------------------------------------------------------------------


def test_gae_by_hand():
    # γ = 0.5, λ = 0.5, r = (1, 2, 4), V = (2, 1, 3)
    # δ₂ = 4 − 3 = 1;  δ₁ = 2 + 0.5·3 − 1 = 2.5;  δ₀ = 1 + 0.5·1 − 2 = −0.5
    # A₂ = 1;  A₁ = 2.5 + 0.25·1 = 2.75;  A₀ = −0.5 + 0.25·2.75 = 0.1875;  R = A + V
    advantages, returns = gae(
        torch.tensor([[1.0, 2.0, 4.0]]),
        torch.tensor([[2.0, 1.0, 3.0]]),
        torch.ones(1, 3).bool(),
        gamma=0.5,
        gae_lambda=0.5,
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.1875, 2.75, 1.0]]))
    torch.testing.assert_close(returns, torch.tensor([[2.1875, 3.75, 4.0]]))


def sum_of_td_errors(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = Σ_l (γλ)^l δ_{t+l}, written as the sum and not as the recursion."""
    future = [*values, 0.0][1 : len(values) + 1]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, future, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_gae_of_a_row_with_holes_is_gae_of_its_compact_sequence(gamma, lam):
    torch.manual_seed(0)
    mask = ragged_mask()
    rewards, values = torch.randn(2, 6, 6, dtype=torch.float64)
    advantages, returns = gae(
        rewards.masked_fill(~mask, NAN), values.masked_fill(~mask, INF), mask, gamma=gamma, gae_lambda=lam
    )
    for b in range(6):
        columns = mask[b].nonzero().flatten().tolist()
        compact = sum_of_td_errors(rewards[b, columns].tolist(), values[b, columns].tolist(), gamma, lam)
        expected = torch.zeros(6, dtype=torch.float64)
        expected[columns] = torch.tensor(compact, dtype=torch.float64)
        torch.testing.assert_close(advantages[b], expected)
        expected[columns] += values[b, columns]
        torch.testing.assert_close(returns[b], expected)


def test_returns_at_lambda_one_are_discounted_sums_of_rewards():
    rewards = torch.tensor([[1.0, 0.0, 8.0]])
    _, returns = gae(rewards, torch.randn(1, 3), torch.ones(1, 3).bool(), gamma=0.5, gae_lambda=1.0)
    torch.testing.assert_close(returns, torch.tensor([[3.0, 4.0, 8.0]]))  # 1 + 8/4, 8/2, 8


def test_gae_does_not_depend_on_right_padding():
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 3, 5)
    mask = ragged_mask()[:3, :5]
    pad = torch.nn.functional.pad
    short = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.9)
    long = gae(pad(rewards, (0, 4), value=NAN), pad(values, (0, 4)), pad(mask, (0, 4)), gamma=0.9, gae_lambda=0.9)
    for a, b in zip(short, long, strict=True):
        assert torch.equal(pad(a, (0, 4)), b)


def test_gae_does_not_modify_its_inputs_and_returns_float32_without_a_graph():
    rewards, values = torch.ones(1, 3).bfloat16(), torch.ones(1, 3).bfloat16().requires_grad_()
    advantages, returns = gae(rewards, values, torch.tensor([[True, True, False]]), gamma=0.9, gae_lambda=0.9)
    assert advantages.dtype == returns.dtype == torch.float32
    assert not advantages.requires_grad and not returns.requires_grad
    assert (rewards == 1).all() and (values == 1).all()


def test_wrong_gae_inputs_are_refused():
    x, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    with pytest.raises(ValueError, match="gamma is 1.5"):
        gae(x, x, mask, gamma=1.5, gae_lambda=0.9)
    with pytest.raises(ValueError, match="gae_lambda is -0.1"):
        gae(x, x, mask, gamma=1.0, gae_lambda=-0.1)
    with pytest.raises(ValueError, match="bool"):
        gae(x, x, mask.float(), gamma=1.0, gae_lambda=0.9)
    with pytest.raises(ValueError, match=r"values has shape \(1, 3\)"):
        gae(x, torch.zeros(1, 3), mask, gamma=1.0, gae_lambda=0.9)
