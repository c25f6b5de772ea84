"""Rollout log-prob mismatch and its correction weights, by hand and against an exact expectation."""

import math
from functools import partial

import pytest
import torch

from dschat.rlhf.rollouts.logprob_mismatch import mismatch_metrics, rollout_logprob_mismatch
from dschat.rlhf.updates.rollout_correction import CORRECTIONS, correction_weights

tis = partial(correction_weights, correction="tis")
NAN, INF = float("nan"), float("inf")
# Ratios of actor to decoder probabilities: 3, 1/2, 1 and 6/5 for four tokens; the fifth is padding.
ROLLOUT = torch.tensor([[0.2, 0.8, 0.5, 0.5, 1.0]]).log()
ACTOR = torch.tensor([[0.6, 0.4, 0.5, 0.6, 1.0]]).log()
MASK = torch.tensor([[True, True, True, True, False]])


def test_correction_weights_are_actor_over_decoder_up_to_the_cap():
    weights, metrics = tis(ACTOR, ROLLOUT, MASK, cap=1.25)
    torch.testing.assert_close(weights, torch.tensor([[1.25, 0.5, 1.0, 1.2, 0.0]]))
    assert metrics["correction_weight"].item() == pytest.approx(3.95 / 4)
    assert metrics["correction_cut"].item() == 1 / 4
    torch.testing.assert_close(tis(ACTOR, ROLLOUT, MASK, cap=5.0)[0], torch.tensor([[3.0, 0.5, 1.0, 1.2, 0.0]]))


def test_weighted_samples_of_the_decoder_have_the_mean_of_the_actor():
    decoder, actor = torch.tensor([[0.7, 0.2, 0.1]]).double(), torch.tensor([[0.3, 0.3, 0.4]]).double()
    value, mask = torch.tensor([[1.0, -2.0, 5.0]]).double(), torch.ones(1, 3).bool()
    expected = (actor * value).sum()
    weights, _ = tis(actor.log(), decoder.log(), mask, cap=INF)
    torch.testing.assert_close((decoder * weights * value).sum(), expected)
    assert not torch.isclose((decoder * value).sum(), expected)


def test_correction_weights_carry_no_gradient():
    actor, decoder = ACTOR.clone().requires_grad_(), ROLLOUT.clone().requires_grad_()
    weights, metrics = tis(actor, decoder, MASK, cap=2.0)
    mismatch = rollout_logprob_mismatch(actor, decoder, MASK)
    assert not any(x.requires_grad for x in (weights, *metrics.values(), *mismatch.values()))


def test_logprob_mismatch_by_hand():
    # Δ = ln 3, −ln 2, 0, ln 1.2: Σ|Δ| = ln(3 · 2 · 1.2) = ln 7.2; ratios 3, 0.5, 1, 1.2, their sum 5.7
    metrics = mismatch_metrics([rollout_logprob_mismatch(ACTOR, ROLLOUT, MASK)])
    expected = {
        "rollout_logprob_mismatch_mean": math.log(7.2) / 4, "rollout_logprob_mismatch_max": math.log(3),
        "rollout_ratio": 5.7 / 4,
    }  # fmt: skip
    assert metrics == pytest.approx(expected, rel=1e-6)
    # The largest mismatch may have either sign; the ratio shows which.
    metrics = mismatch_metrics([rollout_logprob_mismatch(ROLLOUT, ACTOR, MASK)])
    assert metrics["rollout_logprob_mismatch_max"] == pytest.approx(math.log(3))
    assert metrics["rollout_ratio"] == pytest.approx((1 / 3 + 2 + 1 + 5 / 6) / 4)


def test_equal_policies_have_no_mismatch_and_ratio_1():
    metrics = mismatch_metrics([rollout_logprob_mismatch(ACTOR, ACTOR, MASK)])
    assert metrics == {"rollout_logprob_mismatch_mean": 0.0, "rollout_logprob_mismatch_max": 0.0, "rollout_ratio": 1.0}
    weights, metrics = tis(ACTOR, ACTOR, MASK, cap=2.0)
    assert torch.equal(weights, MASK.float()) and metrics["correction_weight"] == 1


def test_mismatch_and_weights_do_not_depend_on_the_batch_size():
    torch.manual_seed(0)
    actor, decoder = torch.randn(2, 6, 5, dtype=torch.float64)
    mask = torch.rand(6, 5) < 0.6
    mask[5] = False  # a batch without a token
    whole = mismatch_metrics([rollout_logprob_mismatch(actor, decoder, mask)])
    cut = [slice(0, 1), slice(1, 5), slice(5, 6)]
    by_part = [rollout_logprob_mismatch(actor[r], decoder[r], mask[r]) for r in cut]
    assert mismatch_metrics(by_part) == pytest.approx(whole)
    weights, metrics = tis(actor, decoder, mask, cap=1.5)
    parts = [tis(actor[r], decoder[r], mask[r], cap=1.5, normalizer=float(mask.sum())) for r in cut]
    assert torch.equal(torch.cat([part for part, _ in parts]), weights)
    for name, value in metrics.items():
        torch.testing.assert_close(sum(part[name] for _, part in parts), value)
    assert 0 < metrics["correction_cut"] < 1


@pytest.mark.parametrize("rubbish", [NAN, INF, -INF])
def test_values_at_masked_positions_do_not_change_mismatch_or_weights(rubbish):
    dirty = [x.masked_fill(~MASK, rubbish) for x in (ACTOR, ROLLOUT)]
    actual, expected = (rollout_logprob_mismatch(*pair, MASK) for pair in (dirty, (ACTOR, ROLLOUT)))
    assert mismatch_metrics([actual]) == mismatch_metrics([expected])
    weights, metrics = tis(*dirty, MASK, cap=2.0)
    expected, others = tis(ACTOR, ROLLOUT, MASK, cap=2.0)
    assert torch.equal(weights, expected) and metrics == others


def test_mismatch_without_tokens_is_zero_and_not_nan():
    empty_mask = torch.zeros_like(MASK)
    for normalizer in (None, 0.0):  # of a step without trained tokens
        weights, metrics = tis(ACTOR, ROLLOUT, empty_mask, cap=2.0, normalizer=normalizer)
        assert not weights.any() and not any(metrics.values())
    assert set(mismatch_metrics([rollout_logprob_mismatch(ACTOR, ROLLOUT, empty_mask)]).values()) == {0.0}


def test_a_token_of_vanishing_decoder_probability_gives_finite_weights():
    decoder = torch.tensor([[-INF, 0.0]])
    weights, _ = tis(torch.tensor([[-1.0, -200.0]]), decoder, torch.ones(1, 2).bool(), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[2.0, math.exp(-20)]]))
    mismatch = rollout_logprob_mismatch(torch.tensor([[-1.0, -200.0]]), decoder, torch.ones(1, 2).bool())
    assert mismatch["rollout_logprob_mismatch_max"] == 20 and all(value.isfinite() for value in mismatch.values())


def test_invalid_caps_shapes_and_masks_are_refused():
    for cap in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="cap .*2 is usual"):
            tis(ACTOR, ROLLOUT, MASK, cap=cap)
    with pytest.raises(ValueError, match=r"rollout_logprobs has shape \(1, 4\)"):
        rollout_logprob_mismatch(ACTOR, ROLLOUT[:, 1:], MASK)
    with pytest.raises(ValueError, match=r"mask.bool\(\)"):
        tis(ACTOR, ROLLOUT, MASK.long(), cap=2.0)


def test_mis_masks_weights_outside_the_bounds_and_keeps_the_others():
    weights, metrics = correction_weights(ACTOR, ROLLOUT, MASK, correction="mis", cap=2.0, floor=0.6)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.0, 1.0, 1.2, 0.0]]))
    assert metrics["correction_weight"].item() == pytest.approx(2.2 / 4) and metrics["correction_cut"].item() == 2 / 4


@pytest.mark.parametrize(("correction", "bounds", "expected"), [
    ("seq_tis", {"cap": 2.0}, [1.8, 1.8, 1.8, 1.8, 0.0]),  # 3 · 1/2 · 1 · 6/5
    ("seq_tis", {"cap": 1.5}, [1.5, 1.5, 1.5, 1.5, 0.0]),
    ("seq_mis", {"cap": 2.0, "floor": 0.5}, [1.8, 1.8, 1.8, 1.8, 0.0]),
    ("seq_mis", {"cap": 1.5, "floor": 0.5}, [0.0] * 5),
    ("seq_mis", {"cap": 3.0, "floor": 2.0}, [0.0] * 5),
])  # fmt: skip
def test_a_sequence_weight_is_the_product_of_its_token_weights(correction, bounds, expected):
    weights, _ = correction_weights(ACTOR, ROLLOUT, MASK, correction=correction, **bounds)
    torch.testing.assert_close(weights, torch.tensor([expected]))


def test_sequence_weighted_samples_of_the_decoder_have_the_mean_of_the_actor():
    """Two tokens, each 0 or 1: the four responses with their chances, exactly."""
    decoder, actor = torch.tensor([0.7, 0.4]).double(), torch.tensor([0.5, 0.9]).double()  # of a 1
    actual = expected = 0.0
    for first in (0, 1):
        for second in (0, 1):
            sampled = torch.tensor([first, second]).bool()
            probabilities = [torch.where(sampled, policy, 1 - policy) for policy in (actor, decoder)]
            weights, _ = correction_weights(
                probabilities[0].log()[None],
                probabilities[1].log()[None],
                torch.ones(1, 2).bool(),
                correction="seq_tis",
                cap=INF,
            )
            value = 1.0 + first - 3.0 * second
            actual += probabilities[1].prod() * weights[0, 0] * value
            expected += probabilities[0].prod() * value
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("settings", [
    {"correction": "clip", "cap": 2.0}, {"correction": "mis", "cap": 1.0, "floor": 1.0},
    {"correction": "seq_mis", "cap": 1.0, "floor": -0.1},
])  # fmt: skip
def test_unknown_corrections_and_invalid_bounds_are_refused(settings):
    with pytest.raises(ValueError, match="choose one of|floor < cap"):
        correction_weights(ACTOR, ROLLOUT, MASK, **settings)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_equal_policies_have_correction_weight_1(correction):
    weights, metrics = correction_weights(ACTOR, ACTOR, MASK, correction=correction, cap=2.0, floor=0.5)
    assert torch.equal(weights, MASK.float()) and metrics["correction_cut"] == 0
