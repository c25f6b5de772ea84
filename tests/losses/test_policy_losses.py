"""Policy losses and aggregations by hand, and against loops without autograd, with finite-difference gradients."""

import math

import pytest
import torch

from dschat.losses.aggregation import AGGREGATIONS, aggregation_weights
from dschat.losses.policy import cispo_loss, gspo_loss, policy_loss, sapo_loss
from dschat.losses.regularization import entropy_bonus, kl_loss

NAN, INF = float("nan"), float("inf")
LOSSES = {
    "ppo_clip": lambda **batch: policy_loss(**batch, clip_range=(0.2, 0.3)),
    "dual_clip": lambda **batch: policy_loss(**batch, clip_range=(0.2, 0.3), dual_clip=1.4),
    "gspo": lambda **batch: gspo_loss(**batch, clip_range=(0.05, 0.08)),
    "cispo": lambda **batch: cispo_loss(**batch, clip_range=(0.3, 0.2)),
    "sapo": lambda **batch: sapo_loss(**batch, positive_temperature=1.0, negative_temperature=2.5),
}


def batch_of(seed: int = 0) -> dict[str, torch.Tensor]:
    """[5, 6] float64 rows: full, short, with holes, one token, empty; ratios on both sides of every clip range."""
    torch.manual_seed(seed)
    old = -torch.rand(5, 6, dtype=torch.float64) - 0.5
    rows = ("111111", "110000", "101100", "000100", "000000")
    return {
        "logprobs": old + 0.4 * torch.randn(5, 6, dtype=torch.float64),
        "old_logprobs": old,
        "advantages": torch.randn(5, 6, dtype=torch.float64),
        "response_mask": torch.tensor([[c == "1" for c in row] for row in rows]),
        "weights": 2 * torch.rand(5, 6, dtype=torch.float64),
    }


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def token_losses(name: str, ratios: list[float], logprobs: list[float], advantages: list[float],
                 frozen: list[float]) -> list[float]:  # fmt: skip
    """The loss of each token of a response.

    frozen: the ratios at the point of differentiation, constant under a stop-gradient while logprobs are perturbed.
    """
    losses = []
    for t, (ratio, advantage) in enumerate(zip(ratios, advantages, strict=True)):
        if name in ("ppo_clip", "dual_clip"):
            loss = max(-advantage * ratio, -advantage * clip(ratio, 0.8, 1.3))
            if name == "dual_clip" and advantage < 0:
                loss = min(loss, -1.4 * advantage)
        elif name == "gspo":  # s_it = sg[s_i] · π_it / sg[π_it]
            sequence_ratio = math.exp(sum(map(math.log, frozen)) / len(frozen)) * ratio / frozen[t]
            loss = max(-advantage * sequence_ratio, -advantage * clip(sequence_ratio, 0.95, 1.08))
        elif name == "cispo":
            loss = -clip(frozen[t], 0.7, 1.2) * advantage * logprobs[t]
        else:
            temperature = 1.0 if advantage > 0 else 2.5
            loss = -advantage * 4 / temperature / (1 + math.exp(-temperature * (ratio - 1)))
        losses.append(loss)
    return losses


def naive_loss(name: str, batch: dict[str, torch.Tensor], logprobs: torch.Tensor) -> float:
    """Σ w·loss / tokens in loops; what is under a stop-gradient is computed from batch["logprobs"]."""
    total, tokens = 0.0, 0
    for i, mask in enumerate(batch["response_mask"]):
        columns = mask.nonzero().flatten().tolist()
        if not columns:
            continue
        old, fixed, current = (x[i, columns].tolist() for x in (batch["old_logprobs"], batch["logprobs"], logprobs))
        frozen = [math.exp(a - b) for a, b in zip(fixed, old, strict=True)]
        ratios = [math.exp(a - b) for a, b in zip(current, old, strict=True)]
        losses = token_losses(name, ratios, current, batch["advantages"][i, columns].tolist(), frozen)
        total += sum(w * x for w, x in zip(batch["weights"][i, columns].tolist(), losses, strict=True))
        tokens += len(columns)
    return total / tokens


def finite_differences(name: str, batch: dict[str, torch.Tensor], step: float = 1e-5) -> torch.Tensor:
    """[B, T]: the gradient with respect to logprobs, one token at a time, by central differences."""
    gradient = torch.zeros_like(batch["logprobs"])
    for index in batch["response_mask"].nonzero().tolist():
        perturbed = [batch["logprobs"].clone() for _ in range(2)]
        perturbed[0][tuple(index)] += step
        perturbed[1][tuple(index)] -= step
        up, down = (naive_loss(name, batch, logprobs) for logprobs in perturbed)
        gradient[tuple(index)] = (up - down) / (2 * step)
    return gradient


def loss_and_gradient(name: str, batch: dict[str, torch.Tensor], **keywords) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = batch["logprobs"].detach().requires_grad_()
    loss, _ = LOSSES[name](**batch | {"logprobs": logprobs}, **keywords)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_a_loop_and_its_finite_differences(name, seed):
    batch = batch_of(seed)
    loss, gradient = loss_and_gradient(name, batch)
    assert loss.item() == pytest.approx(naive_loss(name, batch, batch["logprobs"]), rel=1e-9)
    torch.testing.assert_close(gradient, finite_differences(name, batch), atol=1e-8, rtol=1e-6)
    metrics = LOSSES[name](**batch)[1]
    assert 0 < metrics["clip_fraction"] < 1 or name == "sapo"


@pytest.mark.parametrize("name", LOSSES)
def test_weights_multiply_the_loss_of_each_token(name):
    batch = batch_of()
    loss, gradient = loss_and_gradient(name, batch | {"weights": 3 * batch["weights"]})
    unscaled, unscaled_gradient = loss_and_gradient(name, batch)
    torch.testing.assert_close((loss, gradient), (3 * unscaled, 3 * unscaled_gradient))
    without = {key: value for key, value in batch.items() if key != "weights"}
    ones = batch | {"weights": torch.ones(5, 6, dtype=torch.float64)}
    assert LOSSES[name](**without)[0] == LOSSES[name](**ones)[0]


# --- by hand ---------------------------------------------------------------------------------------------------------


def ratios(*values: float) -> dict[str, torch.Tensor]:
    """One response whose tokens have these ratios, with logprobs that carry a gradient."""
    old = torch.full((1, len(values)), -1.0)
    logprobs = (old + torch.tensor([values]).log()).requires_grad_()
    return {"logprobs": logprobs, "old_logprobs": old, "response_mask": torch.ones(1, len(values)).bool()}


def test_dual_clip_bounds_only_negative_advantages():
    # c = 3. ρ = 5, A = −1: 5 → 3, no gradient; ρ = 2, A = −1: 2 stays; ρ = 5, A = 1: min(5, 1.2) → −1.2 as before
    batch = ratios(5.0, 2.0, 5.0)
    advantages = torch.tensor([[-1.0, -1.0, 1.0]])
    loss, metrics = policy_loss(**batch, advantages=advantages, clip_range=0.2, dual_clip=3.0)
    torch.testing.assert_close(loss, torch.tensor((3 + 2 - 1.2) / 3))
    loss.backward()
    torch.testing.assert_close(batch["logprobs"].grad, torch.tensor([[0.0, 2.0, 0.0]]) / 3)
    assert metrics["dual_clip_fraction"].item() == pytest.approx(1 / 3)
    for bound in (1.0, 0.5, NAN):
        with pytest.raises(ValueError, match="dual_clip is .*> 1: 3 is usual"):
            policy_loss(**batch, advantages=advantages, clip_range=0.2, dual_clip=bound)


def test_gspo_uses_one_ratio_per_response():
    # ρ = 2 and 1/8: s = √(2/8) = 1/2. A = 1: −0.5 a token (0.8 would be less); d/dlogprob = −s·A/2 tokens each.
    batch = ratios(2.0, 0.125)
    loss, metrics = gspo_loss(**batch, advantages=torch.ones(1, 2), clip_range=0.2)
    torch.testing.assert_close(loss, torch.tensor(-0.5))
    loss.backward()
    torch.testing.assert_close(batch["logprobs"].grad, torch.tensor([[-0.25, -0.25]]))
    assert metrics["clip_fraction"] == 0 and metrics["ratio"].item() == pytest.approx(2.125 / 2)
    # A = −1: max(0.5, 0.8) = 0.8, clipped as a whole: no token has a gradient
    batch = ratios(2.0, 0.125)
    loss, metrics = gspo_loss(**batch, advantages=-torch.ones(1, 2), clip_range=0.2)
    torch.testing.assert_close(loss, torch.tensor(0.8))
    loss.backward()
    assert not batch["logprobs"].grad.any() and metrics["clip_fraction"] == 1


def test_gspo_with_seq_mean_token_mean_equals_the_sequence_form_gradient_included():
    """Eq. 5: the mean over responses of min(s·A, clip(s)·A), its gradient taken through every token of s."""
    batch = batch_of(3)
    batch["advantages"] = torch.tensor([1.0, -2.0, 0.5, -1.0, 3.0], dtype=torch.float64)[:, None].expand(5, 6)
    mask, tokens = batch["response_mask"], 12.0
    weights = aggregation_weights(mask, "seq_mean_token_mean", tokens=tokens, sequences=4.0, max_tokens=6)
    actual = loss_and_gradient("gspo", batch | {"weights": weights.double()})
    logprobs = batch["logprobs"].clone().requires_grad_()
    total = 0.0
    for i in range(4):
        s = (logprobs[i, mask[i]] - batch["old_logprobs"][i, mask[i]]).mean().exp()
        advantage = batch["advantages"][i, 0]
        total = total - torch.min(s * advantage, s.clamp(0.95, 1.08) * advantage)
    expected = total / 4
    torch.testing.assert_close(actual[0], expected.detach(), atol=1e-7, rtol=1e-6)  # weights are float32
    torch.testing.assert_close(actual[1], torch.autograd.grad(expected, logprobs)[0], atol=1e-7, rtol=1e-6)
    assert actual[1].any() and not actual[1][mask].all(), "some responses are clipped, some are not"


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    # ρ = 2, A = 1: PPO has no gradient beyond 1.2; CISPO: −1.2 · 1. ρ = 0.5, A = −1: PPO none; CISPO +0.5 (low = 1)
    advantages = torch.tensor([[1.0, -1.0]])
    ppo, cispo = ratios(2.0, 0.5), ratios(2.0, 0.5)
    policy_loss(**ppo, advantages=advantages, clip_range=0.2)[0].backward()
    loss, metrics = cispo_loss(**cispo, advantages=advantages, clip_range=(1.0, 0.2))
    loss.backward()
    assert not ppo["logprobs"].grad.any()
    torch.testing.assert_close(cispo["logprobs"].grad, torch.tensor([[-0.6, 0.25]]))
    # −1.2 · (ln 2 − 1) + 0.5 · (−ln 2 − 1), ÷ 2
    torch.testing.assert_close(loss, torch.tensor((-1.2 * (math.log(2) - 1) + 0.5 * (-math.log(2) - 1)) / 2))
    assert metrics["clip_fraction"].item() == 1 / 2
    _, metrics = cispo_loss(**ratios(2.0, 1.5, 0.5), advantages=torch.ones(1, 3), clip_range=(1.0, 0.2))
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 3)


def test_sapo_has_the_gradient_of_reinforce_at_ratio_1_and_a_smaller_one_far_from_it():
    # Slope −A·ρ·4σ(1 − σ) with σ of τ(ρ − 1): at ρ = 1 it is −A, whatever τ.
    advantages = torch.tensor([[2.0, -3.0, 0.0]])
    batch = ratios(1.0, 1.0, 1.0)
    loss, metrics = sapo_loss(**batch, advantages=advantages, positive_temperature=1.0, negative_temperature=1.05)
    torch.testing.assert_close(loss, torch.tensor((-2 * 2 + 3 * 2 / 1.05) / 3))
    loss.backward()
    torch.testing.assert_close(batch["logprobs"].grad, -advantages / 3)
    assert metrics["clip_fraction"] == 0
    # ρ = 3, τ = 2: σ(4) = 0.982014, 4σ(1 − σ) = 0.0706508, below half; ρ = 1/e, τ = 1: σ(1/e − 1) = 0.347035, 0.906405
    far = ratios(3.0, math.exp(-1))
    loss, metrics = sapo_loss(
        **far, advantages=torch.tensor([[-1.0, 1.0]]), positive_temperature=1.0, negative_temperature=2.0
    )
    loss.backward()
    expected = torch.tensor([[3 * 0.0706508, -math.exp(-1) * 0.9064052]]) / 2
    torch.testing.assert_close(far["logprobs"].grad, expected, atol=1e-5, rtol=1e-4)
    assert metrics["clip_fraction"].item() == 1 / 2
    # ρ = 0.1, τ = 9: σ(−8.1) = 3e-4: a slope of 0.0012 counts as clipped too
    _, metrics = sapo_loss(
        **ratios(0.1, 1.0, 1.0), advantages=torch.ones(1, 3), positive_temperature=9.0, negative_temperature=9.0
    )
    assert metrics["clip_fraction"].item() == pytest.approx(1 / 3)
    for wrong in ({"positive_temperature": 0.0, "negative_temperature": 1.0},
                  {"positive_temperature": 1.0, "negative_temperature": -1.0}):  # fmt: skip
        with pytest.raises(ValueError, match="temperatures are .*> 0"):
            sapo_loss(**far, advantages=advantages[:, :2], **wrong)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
def test_kl_loss_by_hand(estimator):
    # Δ = ln 2, −ln 4, masked; weights 1 and 0.5. Values and slopes as in test_advantages; two tokens.
    logprobs = torch.tensor([[math.log(0.5), math.log(0.1), NAN]], requires_grad=True)
    ref = torch.tensor([[math.log(0.25), math.log(0.4), 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    values = {"k1": (0.6931472, -1.3862944), "k2": (0.2402265, 0.9609060)}
    values["k3"] = values["k3+"] = (0.1931472, 1.6137056)
    slopes = {"k1": (1.0, 1.0), "k2": (0.6931472, -1.3862944), "k3": (0.5, -3.0), "k3+": (0.6931472, -1.3862944)}
    loss, metrics = kl_loss(
        logprobs, ref, mask, estimator=estimator, weights=torch.tensor([[1.0, 0.5, 7.0]]), normalizer=2.0
    )
    first, second = values[estimator]
    torch.testing.assert_close(loss, torch.tensor((first + 0.5 * second) / 2))
    assert metrics["kl_loss"].item() == pytest.approx((first + second) / 2, rel=1e-6), "not weighted"
    loss.backward()
    first, second = slopes[estimator]
    torch.testing.assert_close(logprobs.grad, torch.tensor([[first / 2, 0.5 * second / 2, 0.0]]))
    assert ref.grad is None, "the reference model is not trained"


def test_the_expected_gradient_of_k2_and_k3_plus_is_that_of_the_kl_and_that_of_k1_is_0():
    """The expectation of the gradient over a categorical policy, computed exactly."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.4, 0.1, 0.3], dtype=torch.float64).log()
    policy = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    gradients = {}
    for estimator in ("k1", "k2", "k3", "k3+"):
        mask = torch.ones(1, 4).bool()
        weights = 4 * policy.exp().detach()[None]
        loss, _ = kl_loss(policy[None], reference[None], mask, estimator=estimator, weights=weights)
        (gradients[estimator],) = torch.autograd.grad(loss, logits, retain_graph=True)
    torch.testing.assert_close(gradients["k2"], expected)
    torch.testing.assert_close(gradients["k3+"], expected)
    torch.testing.assert_close(gradients["k1"], torch.zeros(4, dtype=torch.float64))
    assert (gradients["k3"] - expected).abs().max() > 1e-2


def test_the_entropy_bonus_is_a_weighted_mean():
    entropy = torch.tensor([[1.0, 3.0, NAN], [2.0, INF, NAN]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    bonus, metrics = entropy_bonus(entropy, mask, weights=torch.tensor([[0.5, 1.0, 1.0], [2.0, 1.0, 1.0]]))
    torch.testing.assert_close(bonus, torch.tensor(7.5 / 3))
    assert metrics["entropy_bonus"] == 2
    bonus.backward()
    torch.testing.assert_close(entropy.grad, torch.tensor([[0.5, 1.0, 0.0], [2.0, 0.0, 0.0]]) / 3)


# --- aggregation -----------------------------------------------------------------------------------------------------


def test_aggregations_by_hand():
    # Responses of 3, 1 and 0 tokens, N = 4, Q = 2, L = 8
    mask = torch.tensor([[True, False, True, True], [False, True, False, False], [False] * 4])
    losses = torch.tensor([[1.0, NAN, 2.0, 6.0], [NAN, 5.0, NAN, NAN], [NAN] * 4])
    expected = {
        "token_mean": (1 + 2 + 6 + 5) / 4,
        "seq_mean_token_mean": ((1 + 2 + 6) / 3 + 5) / 2,
        "seq_mean_token_sum_norm": ((1 + 2 + 6) / 8 + 5 / 8) / 2,
    }
    assert expected.keys() == set(AGGREGATIONS)
    for aggregation, expected_loss in expected.items():
        weights = aggregation_weights(mask, aggregation, tokens=4.0, sequences=2.0, max_tokens=8)
        assert not weights[~mask].any()
        actual = (weights * losses.masked_fill(~mask, 0.0)).sum() / 4
        assert actual.item() == pytest.approx(expected_loss, rel=1e-6), aggregation
    with pytest.raises(ValueError, match='"mean".*token_mean, seq_mean_token_mean'):
        aggregation_weights(mask, "mean", tokens=4.0, sequences=2.0, max_tokens=8)
    with pytest.raises(ValueError, match=r"mask.bool\(\)"):
        aggregation_weights(mask.long(), "token_mean", tokens=4.0, sequences=2.0, max_tokens=8)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregation_weights_without_tokens_are_zero(aggregation):
    mask = torch.zeros(2, 3).bool()
    assert not aggregation_weights(mask, aggregation, tokens=0.0, sequences=0.0, max_tokens=8).any()


# --- all losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_a_step_sum_to_the_whole_in_loss_gradient_and_metrics(name, aggregation):
    """Parts (micro-batches or ranks) differ in padding; weights and normalizer use the counts of the whole step."""
    batch = batch_of()
    del batch["weights"]
    mask = batch["response_mask"]
    counts = {"tokens": float(mask.sum()), "sequences": float(mask.any(-1).sum())}

    def evaluate(part: dict[str, torch.Tensor]) -> tuple:
        weights = aggregation_weights(part["response_mask"], aggregation, max_tokens=9, **counts)
        part = part | {"weights": weights.double(), "logprobs": part["logprobs"].detach().requires_grad_()}
        loss, metrics = LOSSES[name](**part, normalizer=counts["tokens"])
        return loss.detach(), torch.autograd.grad(loss, part["logprobs"])[0], metrics

    loss, gradient, metrics = evaluate(batch)
    pad = torch.nn.functional.pad
    for cut in ([0, 1, 5], [0, 3, 4, 5]):
        parts = []
        for width, (first, last) in enumerate(zip(cut[:-1], cut[1:], strict=True)):
            rows = {
                key: pad(x[first:last], (0, width), value=x.dtype != torch.bool and NAN) for key, x in batch.items()
            }
            parts.append(evaluate(rows))
        torch.testing.assert_close(sum(part[0] for part in parts), loss)
        torch.testing.assert_close(torch.cat([part[1][:, :6] for part in parts]), gradient)
        for key, value in metrics.items():
            torch.testing.assert_close(sum(part[2][key] for part in parts), value, msg=key)
    assert gradient[mask].any() and not gradient[~mask].any()


@pytest.mark.parametrize("rubbish", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_values_at_masked_positions_change_neither_loss_nor_gradient(name, rubbish):
    batch = batch_of()
    mask = batch["response_mask"]
    dirty = {key: x if key == "response_mask" else x.masked_fill(~mask, rubbish) for key, x in batch.items()}
    for actual, expected in zip(loss_and_gradient(name, dirty), loss_and_gradient(name, batch), strict=True):
        assert torch.equal(actual, expected)
    assert LOSSES[name](**dirty)[1] == LOSSES[name](**batch)[1]


@pytest.mark.parametrize("name", LOSSES)
def test_at_ratio_1_every_loss_has_the_gradient_of_reinforce(name):
    batch = batch_of()
    batch["logprobs"] = batch["old_logprobs"].clone()
    advantage = batch["advantages"][:, :1].expand(5, 6)  # one for each response
    batch |= {"advantages": advantage, "weights": torch.ones(5, 6, dtype=torch.float64)}
    mask = batch["response_mask"]
    expected = torch.where(mask, -advantage, 0.0) / mask.sum()
    torch.testing.assert_close(loss_and_gradient(name, batch)[1], expected)


@pytest.mark.parametrize("name", LOSSES)
def test_invalid_shapes_and_masks_are_refused(name):
    batch = batch_of()
    for key in ("logprobs", "old_logprobs", "advantages", "weights"):
        with pytest.raises(ValueError, match=rf"{key} has shape \(5, 5\).*\(5, 6\)"):
            LOSSES[name](**batch | {key: batch[key][:, 1:]})
    with pytest.raises(ValueError, match=r"mask.bool\(\)"):
        LOSSES[name](**batch | {"response_mask": batch["response_mask"].long()})
    with pytest.raises(ValueError, match="normalizer is -3"):
        LOSSES[name](**batch, normalizer=-3)


@pytest.mark.parametrize("loss", [policy_loss, gspo_loss, cispo_loss])
@pytest.mark.parametrize("wrong", [-0.1, 1.1, (0.2, -0.1), (1.5, 0.2)])
def test_invalid_clip_ranges_are_refused(loss, wrong):
    batch = batch_of()
    with pytest.raises(ValueError, match="clip_range is .*0.2 is usual"):
        loss(**batch, clip_range=wrong)
