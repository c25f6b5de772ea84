"""Losses against hand arithmetic and naive loops; masks, normalizer, gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

from dschat.losses.policy import policy_loss
from dschat.losses.reward_model import pairwise_loss
from dschat.losses.sft import sft_loss
from dschat.losses.value import explained_variance, value_loss

NAN, INF = float("nan"), float("inf")


def rollout(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """A batch [4, 5] of masked rows (one with a hole, one empty) whose ratios lie on both sides of the clip range."""
    torch.manual_seed(seed)
    old = -torch.rand(4, 5, dtype=dtype) - 0.5
    return {
        "logprobs": old + 0.4 * torch.randn(4, 5, dtype=dtype),
        "old_logprobs": old,
        "advantages": torch.randn(4, 5, dtype=dtype),
        "response_mask": torch.tensor([[c == "1" for c in row] for row in ("11111", "11000", "10110", "00000")]),
    }


def weighted_rollout(seed: int = 0) -> dict[str, torch.Tensor]:
    batch = rollout(seed)
    return batch | {"weights": 2 * torch.rand(4, 5, dtype=torch.float64)}


def critic_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    values, old_values, returns = torch.randn(3, 4, 5, dtype=torch.float64)
    mask = rollout()["response_mask"]
    return {"values": values, "old_values": old_values, "returns": returns, "response_mask": mask}


def gradient_of(loss_of, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(x), x)
    return gradient


# --- policy ----------------------------------------------------------------------------------------------------------


def test_policy_loss_by_hand():
    # ρ = 1.5, 0.5, 1.5, 0.5, 2, 1.1 with A = 2, 2, −2, −2, 1, 1; clipped to [0.8, 1.3]:
    # max(−3, −2.6) = −2.6 (clipped);  max(−1, −1.6) = −1;  max(3, 2.6) = 3;  max(1, 1.6) = 1.6 (clipped);
    # max(−2, −1.3) = −1.3 (clipped);  −1.1.  Their sum is −1.4; six tokens
    ratio = torch.tensor([[1.5, 0.5, 1.5, 0.5, 2.0, 1.1]])
    old = torch.full((1, 6), -1.0)
    logprobs = (old + ratio.log()).requires_grad_()
    loss, metrics = policy_loss(
        logprobs, old, torch.tensor([[2.0, 2.0, -2.0, -2.0, 1.0, 1.0]]), torch.ones(1, 6).bool(), clip_range=(0.2, 0.3)
    )
    torch.testing.assert_close(loss, torch.tensor(-1.4 / 6))
    # d/dlogprob = −A·ρ where the unclipped branch is active, else 0; ÷ 6
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -1.0, 3.0, 0.0, 0.0, -1.1]]) / 6)
    # k3 = ρ − 1 − ln ρ: 0.0945349 (twice), 0.1931472 (twice), 0.3068528, 0.0046898; their sum is 0.8869068
    torch.testing.assert_close(metrics["clip_fraction"], torch.tensor(3 / 6))
    torch.testing.assert_close(metrics["approx_kl"], torch.tensor(0.8869068 / 6))
    torch.testing.assert_close(metrics["ratio"], torch.tensor(7.1 / 6))


def test_weighted_policy_loss_by_hand():
    # ρ = 1.5, 0.5, 1.5 with A = 2, 2, −2, clipped to [0.8, 1.3]: −2.6 (clipped), −1, 3; weighted 2, 0.5, 0.25:
    # −5.2 − 0.5 + 0.75 = −4.95; three tokens. d/dlogprob = −w·A·ρ or 0 where clipped: 0, −0.5, 0.75
    ratio = torch.tensor([[1.5, 0.5, 1.5]])
    old, mask = torch.full((1, 3), -1.0), torch.ones(1, 3).bool()
    advantages, weights = torch.tensor([[2.0, 2.0, -2.0]]), torch.tensor([[2.0, 0.5, 0.25]], requires_grad=True)
    logprobs = (old + ratio.log()).requires_grad_()
    loss, metrics = policy_loss(logprobs, old, advantages, mask, clip_range=(0.2, 0.3), weights=weights)
    torch.testing.assert_close(loss, torch.tensor(-4.95 / 3))
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -0.5, 0.75]]) / 3)
    assert weights.grad is None
    # Ratio metrics describe the policy, not the weights.
    _, unweighted = policy_loss(logprobs, old, advantages, mask, clip_range=(0.2, 0.3))
    assert metrics == unweighted


def naive_policy_loss(batch: dict[str, torch.Tensor], low: float, high: float) -> float:
    losses = []
    for b, t in batch["response_mask"].nonzero().tolist():
        ratio = math.exp(batch["logprobs"][b, t].item() - batch["old_logprobs"][b, t].item())
        advantage = batch["advantages"][b, t].item()
        bounded = min(max(ratio, 1 - low), 1 + high)
        losses.append(-min(advantage * ratio, advantage * bounded))  # the paper maximises this minimum
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("clip_range", "low", "high"), [(0.2, 0.2, 0.2), ((0.1, 0.3), 0.1, 0.3), (0.0, 0.0, 0.0)])
def test_policy_loss_equals_a_loop_over_the_paper(clip_range, low, high):
    batch = rollout()
    loss, _ = policy_loss(**batch, clip_range=clip_range)
    assert loss.item() == pytest.approx(naive_policy_loss(batch, low, high), abs=1e-12)


def test_the_gradient_of_the_first_update_is_the_policy_gradient():
    batch = rollout()
    batch["old_logprobs"] = batch["logprobs"]
    mask, advantages = batch["response_mask"], batch["advantages"]
    loss, metrics = policy_loss(**batch, clip_range=0.2)
    torch.testing.assert_close(loss, -advantages[mask].mean())
    assert metrics["ratio"] == 1 and metrics["approx_kl"] == 0 and metrics["clip_fraction"] == 0
    gradient = gradient_of(lambda x: policy_loss(**(batch | {"logprobs": x}), clip_range=0.2)[0], batch["logprobs"])
    torch.testing.assert_close(gradient, torch.where(mask, -advantages, 0.0) / mask.sum())
    # The same when old_logprobs is the trained tensor itself: it is treated as a constant.
    same = gradient_of(lambda x: policy_loss(x, x, advantages, mask, clip_range=0.2)[0], batch["logprobs"])
    torch.testing.assert_close(same, gradient)


def test_a_descent_step_raises_the_probability_of_good_tokens_and_lowers_that_of_bad_ones():
    logits = torch.zeros(1, 2, 3, requires_grad=True)
    chosen = F.log_softmax(logits, dim=-1)[..., 0]  # [1, 2]
    loss, _ = policy_loss(chosen, chosen, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2).bool(), clip_range=0.2)
    loss.backward()
    stepped = F.log_softmax(logits - logits.grad, dim=-1)[..., 0]
    assert stepped[0, 0] > chosen[0, 0] and stepped[0, 1] < chosen[0, 1]


def test_approx_kl_is_an_unbiased_estimate_of_kl_old_new():
    old, new = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    exact = (old * (old / new).log()).sum().item()
    estimates = []
    for token in range(3):
        a, b = old[token].log().reshape(1, 1), new[token].log().reshape(1, 1)
        _, metrics = policy_loss(b, a, torch.ones(1, 1), torch.ones(1, 1).bool(), clip_range=0.2)
        estimates.append(old[token].item() * metrics["approx_kl"].item())
    assert sum(estimates) == pytest.approx(exact)


@pytest.mark.parametrize(("log_ratio", "ratio"), [(500.0, math.exp(20.0)), (-500.0, math.exp(-20.0))])
def test_extreme_ratios_are_clamped_on_both_sides(log_ratio, ratio):
    logprobs = torch.full((1, 1), log_ratio, requires_grad=True)
    loss, metrics = policy_loss(
        logprobs, torch.zeros(1, 1), -torch.ones(1, 1), torch.ones(1, 1).bool(), clip_range=(1.0, 1e9)
    )
    loss.backward()
    assert metrics["ratio"].item() == pytest.approx(ratio, rel=1e-5)
    assert loss.item() == pytest.approx(ratio, rel=1e-5) and logprobs.grad.isfinite().all()


def test_no_gradient_reaches_advantages_or_old_logprobs():
    batch = rollout()
    for name in ("old_logprobs", "advantages"):
        batch[name].requires_grad_()
    loss, _ = policy_loss(**batch, clip_range=0.2)
    assert not loss.requires_grad


@pytest.mark.parametrize("clip_range", [-0.1, 1.2, (0.2, -0.1), (1.5, 0.2), NAN])
def test_clip_ranges_outside_their_bounds_are_refused(clip_range):
    with pytest.raises(ValueError, match="clip_range is .* 0 ≤ low ≤ 1"):
        policy_loss(**rollout(), clip_range=clip_range)


# --- value -----------------------------------------------------------------------------------------------------------


def test_value_loss_by_hand():
    # ε = 0.5;  V = 3, 3, 0.2, −2;  V_old = 1, 1, 0, 0;  R = 0, 3, 1, −2;  C = clip(V, V_old ± ε): 1.5, 1.5, 0.2, −0.5
    # (V−R)²: 9, 0, 0.64, 0.  (C−R)²: 2.25, 2.25 (clip), 0.64, 2.25 (clip)
    # ½·(9 + 2.25 + 0.64 + 2.25) = 7.07; four tokens
    values = torch.tensor([[3.0, 3.0, 0.2, -2.0]], requires_grad=True)
    loss, metrics = value_loss(
        values,
        torch.tensor([[1.0, 1.0, 0.0, 0.0]]),
        torch.tensor([[0.0, 3.0, 1.0, -2.0]]),
        torch.ones(1, 4).bool(),
        value_clip_range=0.5,
    )
    torch.testing.assert_close(loss, torch.tensor(7.07 / 4))
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([[3.0, 0.0, -0.8, 0.0]]) / 4)  # V − R, or 0 where clipped
    expected = {"value_clip_fraction": 2, "value_mean": 4.2, "return_mean": 2, "value_error": 9.64, "return_square": 14}
    assert metrics.keys() == expected.keys()
    for name, total in expected.items():
        torch.testing.assert_close(metrics[name], torch.tensor(total / 4), msg=name)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0, None])
def test_value_loss_equals_a_loop(epsilon):
    batch = critic_batch()
    losses = []
    for b, t in batch["response_mask"].nonzero().tolist():
        value, old, target = (batch[name][b, t].item() for name in ("values", "old_values", "returns"))
        bound = math.inf if epsilon is None else epsilon
        clipped = min(max(value, old - bound), old + bound)
        losses.append(max((value - target) ** 2, (clipped - target) ** 2) / 2)
    loss, _ = value_loss(**batch, value_clip_range=epsilon)
    assert loss.item() == pytest.approx(sum(losses) / len(losses), abs=1e-12)


def test_value_gradients_without_clipping_are_those_of_half_the_squared_error():
    batch = critic_batch()
    mask = batch["response_mask"]
    gradient = gradient_of(lambda x: value_loss(**(batch | {"values": x}), value_clip_range=None)[0], batch["values"])
    torch.testing.assert_close(gradient, torch.where(mask, batch["values"] - batch["returns"], 0.0) / mask.sum())


def test_no_gradient_reaches_returns_or_old_values():
    batch = critic_batch()
    for name in ("old_values", "returns"):
        batch[name].requires_grad_()
    assert not value_loss(**batch, value_clip_range=0.2)[0].requires_grad


def test_explained_variance_is_one_minus_the_ratio_of_variances():
    batch = critic_batch()
    mask = batch["response_mask"]
    returns, residuals = batch["returns"][mask], (batch["returns"] - batch["values"])[mask]
    _, metrics = value_loss(**batch, value_clip_range=0.2)
    expected = 1 - residuals.var(correction=0) / returns.var(correction=0)
    torch.testing.assert_close(explained_variance(metrics), expected)


def test_explained_variance_of_perfect_shifted_and_constant_returns():
    returns, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3).bool()
    for values, target, expected in (
        (returns, returns, 1.0),
        (returns + 5, returns, 1.0),  # a constant offset is not variance
        (torch.zeros(1, 3), returns, 0.0),
        (-returns, returns, -3.0),  # the residual is 2R: 1 − 4
        (1e-3 * returns, 1e-3 * returns, 1.0),  # independent of the scale of the rewards
        (returns, torch.full((1, 3), 0.7), 0.0),
    ):
        _, metrics = value_loss(values, values, target, mask, value_clip_range=None)
        torch.testing.assert_close(explained_variance(metrics), torch.tensor(expected), atol=1e-5, rtol=0)


def test_a_negative_value_clip_range_is_refused():
    with pytest.raises(ValueError, match="value_clip_range is -0.2"):
        value_loss(**critic_batch(), value_clip_range=-0.2)


# --- pairwise --------------------------------------------------------------------------------------------------------


def test_pairwise_loss_by_hand():
    # c − r − margin = 2 − 1 − 1 = 0 → ln 2;  −1 − 1 − 0.5 = −2.5 → ln(1 + e^2.5) = 2.5788897
    # 3 − 2 − 3 = −2 → ln(1 + e^2) = 2.1269280
    # centring 0.1·(2 + 1)² = 0.9;  0.1·(−1 + 1)² = 0;  0.1·(3 + 2)² = 2.5
    chosen, rejected = torch.tensor([2.0, -1.0, 3.0]), torch.tensor([1.0, 1.0, 2.0])
    loss, metrics = pairwise_loss(chosen, rejected, margin=torch.tensor([1.0, 0.5, 3.0]), centering_coef=0.1)
    torch.testing.assert_close(loss, torch.tensor((0.6931472 + 2.5788897 + 2.1269280 + 0.9 + 2.5) / 3))
    expected = {"accuracy": 2 / 3, "chosen_score": 4 / 3, "rejected_score": 4 / 3, "margin": 0.0}
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected)
    _, metrics = pairwise_loss(chosen, -rejected, normalizer=5.0)  # c − r: 2 + 1, −1 + 1, 3 + 2
    expected = {"accuracy": 2 / 5, "chosen_score": 4 / 5, "rejected_score": -4 / 5, "margin": 8 / 5}
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected)


def test_the_pairwise_gradient_increases_the_score_difference():
    chosen, rejected = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    pairwise_loss(chosen, rejected)[0].backward()
    assert chosen.grad.item() == -0.5 and rejected.grad.item() == 0.5  # ∓σ(0)


def test_the_centering_term_moves_the_sum_of_a_pair_towards_zero():
    chosen = torch.full((1,), 3.0, requires_grad=True)
    rejected = torch.full((1,), 1.0, requires_grad=True)
    plain, centred = (pairwise_loss(chosen, rejected, centering_coef=c)[0] for c in (0.0, 0.01))
    gradients = torch.autograd.grad(centred - plain, (chosen, rejected))
    torch.testing.assert_close(torch.cat(gradients), torch.tensor([0.08, 0.08]))  # 2·0.01·(3 + 1)


def test_pairwise_loss_is_finite_for_large_scores():
    chosen, rejected = torch.tensor([-500.0], requires_grad=True), torch.tensor([500.0])
    loss, _ = pairwise_loss(chosen, rejected)
    loss.backward()
    assert loss.item() == 1000 and chosen.grad.item() == -1


def test_half_precision_scores_are_subtracted_in_float32():
    # 1000 − 0.25 and 1000 + 0.25 are both 1000 in bfloat16
    chosen, rejected = torch.tensor([1000.0]).bfloat16(), torch.tensor([0.25]).bfloat16()
    loss, metrics = pairwise_loss(chosen, rejected, centering_coef=1.0)
    assert metrics["margin"].item() == 999.75 and loss.item() == 1000.25**2


def test_a_tie_counts_as_wrong_in_the_pairwise_accuracy():
    assert pairwise_loss(torch.ones(2), torch.ones(2))[1]["accuracy"] == 0


def test_pairwise_loss_refuses_anything_but_one_score_per_sequence():
    with pytest.raises(ValueError, match=r"chosen_scores \(2, 3\)"):
        pairwise_loss(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"margin \(2, 1\)"):
        pairwise_loss(torch.zeros(2), torch.zeros(2), margin=torch.zeros(2, 1))


# --- SFT -------------------------------------------------------------------------------------------------------------


def test_sft_loss_by_hand():
    # −(ln 0.5 + ln 0.25 + ln 0.1) / 3 = (0.6931472 + 1.3862944 + 2.3025851) / 3
    logprobs = torch.tensor([[0.5, 0.25, 0.9], [0.1, 0.9, 0.9]]).log()
    mask = torch.tensor([[True, True, False], [True, False, False]])
    loss, metrics = sft_loss(logprobs, mask)
    torch.testing.assert_close(loss, torch.tensor(4.3820267 / 3))
    assert metrics["nll"] == loss and not metrics["nll"].requires_grad


def test_sft_loss_equals_cross_entropy_in_value_and_gradient():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    labels, mask = torch.randint(0, 7, (2, 5)), torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 1, 1]]).bool()
    logprobs = F.log_softmax(logits, dim=-1).gather(-1, labels[..., None])[..., 0]
    loss = sft_loss(logprobs, mask)[0]
    reference = F.cross_entropy(logits.flatten(0, 1), labels.masked_fill(~mask, -100).flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, reference)
    (gradient,), (expected,) = torch.autograd.grad(loss, logits), torch.autograd.grad(reference, logits)
    torch.testing.assert_close(gradient, expected)


# --- all losses ------------------------------------------------------------------------------------------------------


def policy(batch, **keywords):
    return policy_loss(**batch, clip_range=0.2, **keywords)


def value(batch, **keywords):
    return value_loss(**batch, value_clip_range=0.3, **keywords)


def sft(batch, **keywords):
    return sft_loss(batch["logprobs"], batch["response_mask"], **keywords)


MASKED_LOSSES = [
    pytest.param(policy, rollout, "logprobs", id="policy"),
    pytest.param(policy, weighted_rollout, "logprobs", id="weighted policy"),
    pytest.param(value, critic_batch, "values", id="value"),
    pytest.param(sft, rollout, "logprobs", id="sft"),
]


@pytest.mark.parametrize(("loss_of", "make_batch", "trained"), MASKED_LOSSES)
def test_micro_batches_sum_to_the_whole_step_in_loss_gradient_and_metrics(loss_of, make_batch, trained):
    batch = make_batch()
    batch[trained].requires_grad_()
    whole, whole_metrics = loss_of(batch)
    (whole_gradient,) = torch.autograd.grad(whole, batch[trained])
    count = batch["response_mask"].sum()
    cuts = [slice(0, 1), slice(1, 4)], [slice(0, 3), slice(3, 4)]  # uneven; the last row alone has no token at all
    for cut in cuts:
        for normalizer in (count, count.item()):
            parts = [loss_of({k: x[rows] for k, x in batch.items()}, normalizer=normalizer) for rows in cut]
            total = sum(loss for loss, _ in parts)
            torch.testing.assert_close(total, whole)
            torch.testing.assert_close(torch.autograd.grad(total, batch[trained])[0], whole_gradient)
            for name, expected in whole_metrics.items():
                torch.testing.assert_close(sum(metrics[name] for _, metrics in parts), expected, msg=name)


def test_parts_of_the_pairs_sum_to_the_whole_step_in_loss_gradient_and_metrics():
    torch.manual_seed(0)
    chosen, rejected, margin = torch.randn(3, 5, dtype=torch.float64).unbind()
    chosen.requires_grad_()
    whole, whole_metrics = pairwise_loss(chosen, rejected, margin=margin, centering_coef=0.1)
    parts = [
        pairwise_loss(chosen[r], rejected[r], margin=margin[r], centering_coef=0.1, normalizer=5)
        for r in (slice(0, 2), slice(2, 5), slice(5, 5))
    ]
    total = sum(loss for loss, _ in parts)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(torch.autograd.grad(total, chosen), torch.autograd.grad(whole, chosen))
    for name, expected in whole_metrics.items():
        torch.testing.assert_close(sum(metrics[name] for _, metrics in parts), expected, msg=name)


@pytest.mark.parametrize("rubbish", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize(("loss_of", "make_batch", "trained"), MASKED_LOSSES)
def test_values_at_masked_positions_change_neither_loss_nor_gradient(loss_of, make_batch, trained, rubbish):
    batch = make_batch()
    mask = batch["response_mask"]
    dirty = {k: x if k == "response_mask" else x.masked_fill(~mask, rubbish) for k, x in batch.items()}
    (loss, metrics), (dirty_loss, dirty_metrics) = loss_of(batch), loss_of(dirty)
    assert torch.equal(loss, dirty_loss)
    assert all(torch.equal(metrics[name], dirty_metrics[name]) for name in metrics)
    gradient = gradient_of(lambda x: loss_of(dirty | {trained: x})[0], dirty[trained])
    assert torch.equal(gradient, gradient_of(lambda x: loss_of(batch | {trained: x})[0], batch[trained]))
    assert (gradient[~mask] == 0).all() and (gradient[mask] != 0).any()


@pytest.mark.parametrize(("loss_of", "make_batch", "trained"), MASKED_LOSSES)
def test_loss_does_not_depend_on_padding(loss_of, make_batch, trained):
    batch = make_batch()
    padded = {k: F.pad(x, (2, 3, 0, 1)) for k, x in batch.items()}  # columns on both sides and a row
    torch.testing.assert_close(loss_of(batch), loss_of(padded))


@pytest.mark.parametrize("normalizer", [None, 0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize(("loss_of", "make_batch", "trained"), MASKED_LOSSES)
def test_a_step_without_tokens_has_zero_loss_and_gradient(loss_of, make_batch, trained, normalizer):
    batch = make_batch()
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    batch[trained].requires_grad_()
    loss, metrics = loss_of(batch, normalizer=normalizer)
    loss.backward()
    assert loss == 0 and (batch[trained].grad == 0).all()
    assert all(value == 0 for value in metrics.values())


def test_pairwise_loss_without_pairs_is_zero_and_not_nan():
    scores = torch.zeros(0, requires_grad=True)
    loss, metrics = pairwise_loss(scores, scores)
    loss.backward()
    assert loss == 0 and scores.grad.shape == (0,) and metrics["accuracy"] == 0


@pytest.mark.parametrize(("loss_of", "make_batch", "trained"), MASKED_LOSSES)
def test_half_precision_inputs_are_computed_in_float32(loss_of, make_batch, trained):
    batch = {k: x if x.dtype == torch.bool else x.bfloat16() for k, x in make_batch().items()}
    wide = {k: x if x.dtype == torch.bool else x.float() for k, x in batch.items()}
    assert loss_of(batch)[0].dtype == torch.float32
    torch.testing.assert_close(loss_of(batch), loss_of(wide))


@pytest.mark.parametrize(("loss_of", "make_batch", "trained"), MASKED_LOSSES)
def test_metrics_are_detached_scalars(loss_of, make_batch, trained):
    batch = make_batch()
    batch[trained].requires_grad_()
    loss, metrics = loss_of(batch)
    assert loss.requires_grad and loss.dim() == 0
    assert all(value.dim() == 0 and not value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(("loss_of", "make_batch", "trained"), MASKED_LOSSES)
def test_invalid_shapes_masks_and_normalizers_are_refused(loss_of, make_batch, trained):
    batch = make_batch()
    with pytest.raises(ValueError, match=rf"{trained} has shape \(4, 4\).*\(4, 5\)"):
        loss_of(batch | {trained: batch[trained][:, 1:]})
    with pytest.raises(ValueError, match=r"torch.int64.*mask.bool\(\)"):
        loss_of(batch | {"response_mask": batch["response_mask"].long()})
    with pytest.raises(ValueError, match="normalizer is -3"):
        loss_of(batch, normalizer=-3)
