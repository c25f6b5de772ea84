"""Preference losses against hand arithmetic and loops of plain Python floats; signs, normalizer, gradients."""

import math

import pytest
import torch
from test_losses import gradient_of

from dschat.losses.kto import kto_kl, kto_loss
from dschat.losses.preference import (
    chosen_nll,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    orpo_loss,
    robust_loss,
    sequence_logprobs,
    simpo_loss,
)

WITH_REFERENCE = {
    "dpo": (dpo_loss, {"beta": 0.3}),
    "conservative": (dpo_loss, {"beta": 0.3, "label_smoothing": 0.2}),
    "robust": (robust_loss, {"beta": 0.3, "label_smoothing": 0.2}),
    "ipo": (ipo_loss, {"beta": 0.3}),
    "hinge": (hinge_loss, {"beta": 0.3}),
}
WITHOUT_REFERENCE = {"simpo": (simpo_loss, {"beta": 2.0, "gamma": 0.5}), "orpo": (orpo_loss, {"beta": 0.4})}


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pairs(name: str, count: int = 6, seed: int = 0) -> list[torch.Tensor]:
    """Log-probs [count] each: chosen, rejected and, for losses with a reference, those two of the reference."""
    torch.manual_seed(seed)
    return list(-torch.rand(4 if name in WITH_REFERENCE else 2, count, dtype=torch.float64) * 6 - 0.01)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_loop(name: str, columns: list[torch.Tensor], beta: float, **settings: float) -> float:
    """The sum over pairs, one pair at a time, written as in the papers."""
    total = 0.0
    for chosen, rejected, *reference in zip(*(column.tolist() for column in columns), strict=True):
        if name == "simpo":
            total -= math.log(sigmoid(beta * chosen - beta * rejected - settings["gamma"]))
        elif name == "orpo":
            odds = [math.exp(x) / (1 - math.exp(x)) for x in (chosen, rejected)]
            total += -chosen - beta * math.log(sigmoid(math.log(odds[0] / odds[1])))
        else:
            h = (chosen - rejected) - (reference[0] - reference[1])
            right, wrong = -math.log(sigmoid(beta * h)), -math.log(sigmoid(-beta * h))
            eps = settings.get("label_smoothing", 0.0)
            total += {
                "dpo": right,
                "conservative": (1 - eps) * right + eps * wrong,
                "robust": ((1 - eps) * right - eps * wrong) / (1 - 2 * eps),
                "ipo": (h - 1 / (2 * beta)) ** 2,
                "hinge": max(0.0, 1 - beta * h),
            }[name]
    return total


ALL = WITH_REFERENCE | WITHOUT_REFERENCE


@pytest.mark.parametrize("name", ALL)
def test_a_loss_equals_the_loop_over_its_pairs(name):
    function, settings = ALL[name]
    columns = pairs(name)
    loss, _ = function(*columns, **settings)
    torch.testing.assert_close(loss, torch.tensor(by_loop(name, columns, **settings) / 6, dtype=torch.float64))
    divided, _ = function(*columns, **settings, normalizer=10.0)
    torch.testing.assert_close(divided, loss * 6 / 10)


def test_pair_losses_by_hand():
    # chosen −2 (reference −3), rejected −4 (reference −2): log-ratios +1 and −2, h = 3; β = 0.5: z = 1.5
    pair = [numbers(value) for value in (-2.0, -4.0, -3.0, -2.0)]
    # log σ(1.5) = −0.2014133, log σ(−1.5) = −1.7014133
    cases = [
        (dpo_loss, {}, 0.2014133),
        (dpo_loss, {"label_smoothing": 0.1}, 0.9 * 0.2014133 + 0.1 * 1.7014133),
        (robust_loss, {"label_smoothing": 0.1}, (0.9 * 0.2014133 - 0.1 * 1.7014133) / 0.8),
        (ipo_loss, {}, (3 - 1) ** 2),
        (hinge_loss, {}, 0.0),
    ]
    for function, settings, expected in cases:
        loss, metrics = function(*pair, beta=0.5, **settings)
        assert loss.item() == pytest.approx(expected, abs=1e-6), function
        assert {name: value.item() for name, value in metrics.items()} == {
            "rewards/chosen": 0.5, "rewards/rejected": -1.0, "rewards/margins": 1.5, "rewards/accuracies": 1.0,
            "logps/chosen": -2.0, "logps/rejected": -4.0,
        }  # fmt: skip
    swapped = [pair[1], pair[0], pair[3], pair[2]]
    assert hinge_loss(*swapped, beta=0.5)[0] == 2.5 and ipo_loss(*swapped, beta=0.5)[0] == 16
    # Means ln ½ and ln ¼: SimPO's −log σ(2·ln 2 − 0.5) = ln(1 + ¼·√e) = 0.3451348; odds 1 and ⅓: log odds ratio ln 3,
    # −log σ(ln 3) = ln 4/3, and −ln ½ beside 0.5 times it
    means = [numbers(math.log(0.5)), numbers(math.log(0.25))]
    assert simpo_loss(*means, beta=2.0, gamma=0.5)[0].item() == pytest.approx(0.3451348, abs=1e-6)
    assert orpo_loss(*means, beta=0.5)[0].item() == pytest.approx(math.log(2) + 0.5 * math.log(4 / 3))
    assert chosen_nll(numbers(-1.0, -3.0), normalizer=4.0).item() == 1.0


@pytest.mark.parametrize("name", ALL)
def test_metrics_are_sums_over_pairs_divided_by_the_pairs_of_the_step(name):
    function, settings = ALL[name]
    columns = pairs(name)
    _, metrics = function(*columns, **settings, normalizer=torch.tensor(10.0))
    chosen, rejected, *reference = (column.tolist() for column in columns)
    reference = reference or [[0.0] * 6] * 2
    rewards = [[settings["beta"] * (x - ref) for x, ref in zip(side, ref_side, strict=True)]
               for side, ref_side in zip((chosen, rejected), reference, strict=True)]  # fmt: skip
    margins = [a - b for a, b in zip(*rewards, strict=True)]
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx({
        "rewards/chosen": sum(rewards[0]) / 10, "rewards/rejected": sum(rewards[1]) / 10,
        "rewards/margins": sum(margins) / 10,
        "rewards/accuracies": sum(margin > 0 for margin in margins) / 10, "logps/chosen": sum(chosen) / 10,
        "logps/rejected": sum(rejected) / 10,
    })  # fmt: skip


def test_before_the_first_update_dpo_loss_is_ln_2_and_accuracy_one_half():
    policy = torch.randn(8)
    rejected = torch.randn(8)
    for label_smoothing in (0.0, 0.25):
        loss, metrics = dpo_loss(policy, rejected, policy, rejected, beta=0.1, label_smoothing=label_smoothing)
        assert loss.item() == torch.tensor(2.0).log().item()
        assert metrics["rewards/accuracies"] == 0.5 and metrics["rewards/margins"] == metrics["rewards/chosen"] == 0


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_raises_chosen_lowers_rejected_and_does_not_reach_the_reference(name):
    function, settings = ALL[name]
    columns = pairs(name)
    if name == "ipo":  # beyond 1/(2β) its gradient reverses: keep the margins below
        columns = [column / 10 for column in columns]
    if name == "hinge":
        columns = [column / 4 for column in columns]
    inputs = [column.requires_grad_() for column in columns]
    loss, _ = function(*inputs, **settings)
    loss.backward()
    assert (inputs[0].grad < 0).all() and (inputs[1].grad > 0).all()
    assert all(reference.grad is None for reference in inputs[2:])


def test_beyond_the_margin_the_ipo_gradient_reverses_and_the_hinge_gradient_is_zero():
    far = [numbers(value) for value in (-1.0, -9.0, -1.0, -1.0)]  # h = 8, target 1 at β = 0.5
    assert gradient_of(lambda x: ipo_loss(x, *far[1:], beta=0.5)[0], far[0]) == 14  # 2 (8 − 1)
    assert gradient_of(lambda x: hinge_loss(x, *far[1:], beta=0.5)[0], far[0]) == 0


def test_robust_loss_averages_to_dpo_over_flipped_labels():
    """(1 − ε)·robust(pair) + ε·robust(flipped pair) = DPO(pair): the loss is unbiased."""
    chosen, rejected, *reference = pairs("robust")
    unflipped = robust_loss(chosen, rejected, *reference, beta=0.5, label_smoothing=0.3)[0]
    flipped = robust_loss(rejected, chosen, *reversed(reference), beta=0.5, label_smoothing=0.3)[0]
    torch.testing.assert_close(0.7 * unflipped + 0.3 * flipped, dpo_loss(chosen, rejected, *reference, beta=0.5)[0])


@pytest.mark.parametrize("name", ALL)
def test_parts_of_a_preference_step_sum_to_the_whole(name):
    function, settings = ALL[name]
    columns = pairs(name)
    whole, metrics = function(*columns, **settings)
    parts = [function(*(c[cut] for c in columns), **settings, normalizer=6.0) for cut in (slice(0, 4), slice(4, 6))]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for key, value in metrics.items():
        torch.testing.assert_close(sum(part[key] for _, part in parts), value)


@pytest.mark.parametrize("name", ALL)
def test_losses_without_pairs_are_zero_and_keep_the_graph(name):
    function, settings = ALL[name]
    for normalizer in (0.0, torch.tensor(0.0)):
        columns = [torch.zeros(3, requires_grad=True) for _ in pairs(name)]
        loss, metrics = function(*(column[:0] for column in columns), **settings, normalizer=normalizer)
        loss.backward()
        assert loss == 0 and all(value == 0 for value in metrics.values()) and columns[0].grad.eq(0).all()


def test_response_log_probs_are_sums_over_the_mask():
    logprobs = torch.tensor([[float("nan"), -1.0, -3.0, float("inf")], [-1.0, -2.0, -3.0, -6.0], [1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    assert sequence_logprobs(logprobs, mask).tolist() == [-4.0, -12.0, 0.0]


def test_log_odds_of_a_certain_response_are_finite():
    certain = torch.zeros(2, requires_grad=True)
    loss, _ = orpo_loss(certain, torch.tensor([-1.0, 0.0]), beta=1.0)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(certain.grad).all()


# --- KTO -------------------------------------------------------------------------------------------------------------


def unpaired_batch(count: int = 7) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    logprobs, ref_logprobs = torch.randn(2, count, dtype=torch.float64)
    return {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "desirable": torch.arange(count) % 3 > 0}


SETTINGS = {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.7}


def test_kto_equals_the_loop_over_its_rows():
    batch, kl = unpaired_batch(), 0.4
    total = 0.0
    rewards: dict[bool, list[float]] = {True: [], False: []}
    logprobs: dict[bool, list[float]] = {True: [], False: []}
    for logprob, reference, good in zip(*(batch[name].tolist() for name in batch), strict=True):
        ratio = logprob - reference
        rewards[good].append(0.5 * ratio)
        logprobs[good].append(logprob)
        total += 1.5 * (1 - sigmoid(0.5 * (ratio - kl))) if good else 0.7 * (1 - sigmoid(0.5 * (kl - ratio)))
    loss, metrics = kto_loss(**batch, kl=numbers(kl).sum(), **SETTINGS)
    assert loss.item() == pytest.approx(total / 7)
    means = {good: sum(values) / len(values) for good, values in rewards.items()}
    assert metrics["rewards/chosen"].item() == pytest.approx(means[True])
    assert metrics["rewards/rejected"].item() == pytest.approx(means[False])
    assert metrics["rewards/margins"].item() == pytest.approx(means[True] - means[False])
    for good, key in ((True, "logps/chosen"), (False, "logps/rejected")):
        assert metrics[key].item() == pytest.approx(sum(logprobs[good]) / len(logprobs[good]))
    right = sum(r > 0.5 * kl for r in rewards[True]) + sum(r < 0.5 * kl for r in rewards[False])
    assert metrics["rewards/accuracies"].item() == pytest.approx(right / 7)


def test_kto_by_hand_and_its_gradient():
    # r = 2 (desirable) and 2 (undesirable), kl = 1, β = 1: 1 − σ(1) = 0.2689414 and 1 − σ(−1) = 0.7310586
    batch = {
        "logprobs": numbers(-1.0, -1.0),
        "ref_logprobs": numbers(-3.0, -3.0),
        "desirable": torch.tensor([True, False]),
    }
    loss, metrics = kto_loss(**batch, kl=torch.tensor(1.0), beta=1.0)
    assert loss.item() == pytest.approx((0.2689414 + 0.7310586) / 2, abs=1e-6) and metrics["rewards/accuracies"] == 0.5
    # d/dr: −σ'(1) = −0.1966119 raises the desirable log-ratio, +0.1966119 lowers the other; ÷ 2
    gradient = gradient_of(
        lambda x: kto_loss(x, batch["ref_logprobs"], batch["desirable"], kl=torch.tensor(1.0), beta=1.0)[0],
        batch["logprobs"],
    )
    torch.testing.assert_close(gradient, numbers(-0.1966119, 0.1966119) / 2, atol=1e-6, rtol=0)
    kl = torch.tensor(1.0, requires_grad=True)
    loss = kto_loss(
        batch["logprobs"].clone().requires_grad_(), batch["ref_logprobs"], batch["desirable"], kl=kl, beta=1.0
    )[0]
    loss.backward()
    assert kl.grad is None


def test_parts_of_a_kto_step_sum_to_the_whole():
    batch, kl = unpaired_batch(), torch.tensor(0.3, dtype=torch.float64)
    whole, metrics = kto_loss(**batch, kl=kl, **SETTINGS)
    share = batch["desirable"].double().mean()
    parts = [
        kto_loss(
            **{name: x[cut] for name, x in batch.items()}, kl=kl, **SETTINGS, desirable_share=share, normalizer=7.0
        )
        for cut in (slice(0, 1), slice(1, 7), slice(7, 7))
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for key, value in metrics.items():
        torch.testing.assert_close(sum(part[key] for _, part in parts), value)


def test_the_kto_reference_point_is_the_mean_log_ratio_and_never_negative():
    assert kto_kl(torch.tensor(6.0), torch.tensor(4.0)) == 1.5
    assert kto_kl(torch.tensor(-6.0), torch.tensor(4.0)) == 0
    assert kto_kl(torch.tensor(0.0), torch.tensor(0.0)) == 0


def test_values_out_of_range_and_shapes_that_differ_are_refused():
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ValueError, match="beta is 0"):
        dpo_loss(one, one, one, one, beta=0)
    for smoothing in (-0.1, 0.5):
        for function in (dpo_loss, robust_loss):
            with pytest.raises(ValueError, match="label_smoothing is"):
                function(one, one, one, one, beta=0.1, label_smoothing=smoothing)
    with pytest.raises(ValueError, match=r"ref_rejected \(2,\): all must be \[B\]"):
        ipo_loss(one, one, one, two, beta=0.1)
    with pytest.raises(ValueError, match="all must be"):
        simpo_loss(one, two, beta=2.0, gamma=0.0)
    with pytest.raises(ValueError, match="desirable|mask"):
        kto_loss(two, two, torch.ones(1).bool(), kl=one[0], beta=0.1)
