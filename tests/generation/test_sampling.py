"""Sampling from logits and uniform numbers: by hand for four tokens, by statistics otherwise."""

import math

import pytest
import torch

from dschat.generation.sampling import SamplingParams, sample_tokens, truncate_logits
from dschat.tensors import seeded_uniform

FOUR = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()


def draw(uniforms: list[float], logits: torch.Tensor = FOUR, **params: float) -> tuple[list[int], list[float]]:
    rows = logits.expand(len(uniforms), -1)
    tokens, logprobs = sample_tokens(rows, torch.tensor(uniforms), SamplingParams(**params))
    return tokens.tolist(), logprobs.exp().tolist()


def test_a_uniform_number_picks_the_token_whose_share_of_the_unit_interval_it_falls_into():
    tokens, probabilities = draw([0.05, 0.15, 0.29, 0.31, 0.59, 0.61, 0.999])
    assert tokens == [0, 1, 1, 2, 2, 3, 3]
    assert probabilities == pytest.approx([0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4])


def test_temperature_one_half_squares_the_probabilities():
    # .1², .2², .3², .4² over their sum .3: borders at 1/30, 5/30, 14/30.
    tokens, probabilities = draw([0.03, 0.16, 0.17, 0.46, 0.47], temperature=0.5)
    assert tokens == [0, 1, 2, 2, 3]
    assert probabilities == pytest.approx([1 / 30, 4 / 30, 9 / 30, 9 / 30, 16 / 30])


def test_top_k_keeps_the_k_likeliest_and_renormalises():
    tokens, probabilities = draw([0.001, 0.42, 0.43, 0.999], top_k=2)
    assert tokens == [2, 2, 3, 3]
    assert probabilities == pytest.approx([3 / 7, 3 / 7, 4 / 7, 4 / 7])


@pytest.mark.parametrize(("top_p", "support"), [(0.39, {3}), (0.41, {2, 3}), (0.69, {2, 3}), (0.71, {1, 2, 3})])
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p, support):
    kept = truncate_logits(FOUR.unsqueeze(0), top_k=0, top_p=top_p).isfinite()[0].nonzero().squeeze(1)
    assert set(kept.tolist()) == support


def test_top_p_applies_to_the_distribution_after_top_k():
    # Of {.2, .3, .4} / .9 the two largest hold 7/9 = .78 ≥ .75; of the whole distribution they would hold .7 only.
    tokens, probabilities = draw([0.001, 0.42, 0.43], top_k=3, top_p=0.75)
    assert tokens == [2, 2, 3]
    assert probabilities == pytest.approx([3 / 7, 3 / 7, 4 / 7])


def test_temperature_acts_before_top_p():
    # Squared: 16/30 = .53 alone reaches .5; without the temperature .4 would not.
    assert draw([0.001, 0.999], temperature=0.5, top_p=0.5)[0] == [3, 3]


def test_tokens_tied_at_the_cutoff_are_kept():
    tied = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert truncate_logits(tied, top_k=2, top_p=1.0).isfinite().tolist() == [[True, True, True, False]]
    assert truncate_logits(tied, top_k=0, top_p=0.7).isfinite().tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("sharpness", [0.0, 0.001, 3.0])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.999])
def test_top_p_support_is_exact_in_a_large_vocabulary(sharpness, top_p):
    """Flat rows need more than the candidates that are tried first."""
    torch.manual_seed(0)
    logits = torch.randn(3, 3000, dtype=torch.float64) * sharpness + torch.arange(3000) * 1e-4
    kept = truncate_logits(logits.float(), top_k=0, top_p=top_p).isfinite()
    for row, kept_row in zip(logits.softmax(-1).tolist(), kept, strict=True):
        total, needed = 0.0, 0
        for probability in sorted(row, reverse=True):
            if total >= top_p:
                break
            total, needed = total + probability, needed + 1
        assert abs(int(kept_row.sum()) - needed) <= 1  # one token either way where float32 rounds at the border
        assert (
            min(p for p, k in zip(row, kept_row, strict=True) if k)
            >= max([p for p, k in zip(row, kept_row, strict=True) if not k], default=0.0) - 1e-9
        )


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 1.0, -math.inf])
    tokens, _ = draw([2.0**-24, 0.25, 0.9, 1 - 2.0**-24], logits=logits)
    assert tokens == [1, 1, 3, 3]


def test_every_token_of_a_large_vocabulary_has_its_share():
    size = 200_000
    uniforms = torch.rand(64, generator=torch.Generator().manual_seed(0)).clamp(min=1e-6)
    tokens, _ = sample_tokens(torch.zeros(64, size), uniforms, SamplingParams())
    assert (tokens - (uniforms.double() * size).floor()).abs().max() <= 1


def test_samples_follow_the_softmax():
    logits = torch.randn(20, generator=torch.Generator().manual_seed(3))
    count = 20_000
    uniforms = seeded_uniform(7, 0, torch.arange(count), 0)
    tokens, _ = sample_tokens(logits.expand(count, -1), uniforms, SamplingParams(temperature=0.8))
    expected = (logits / 0.8).softmax(-1) * count
    statistic = ((tokens.bincount(minlength=20) - expected) ** 2 / expected).sum().item()
    assert statistic < 43.8  # 19 degrees of freedom, p = 0.001


def test_greedy_takes_the_lowest_id_of_the_likeliest_under_the_models_own_distribution():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]], dtype=torch.bfloat16)
    tokens, logprobs = sample_tokens(logits, None, SamplingParams(temperature=0, top_k=1, top_p=0.1))
    assert tokens.tolist() == [1]
    # 2 − ln(1 + 2e² + e)
    assert logprobs.item() == pytest.approx(2 - math.log(1 + 2 * math.e**2 + math.e), abs=1e-6)
    assert logprobs.dtype == torch.float32


def test_nan_logits_give_a_nan_logprob():
    tokens, logprobs = sample_tokens(torch.tensor([[math.nan, 0.0, 1.0]]), torch.tensor([0.5]), SamplingParams())
    assert 0 <= tokens.item() < 3
    assert logprobs.isnan().all()


def test_every_parameter_out_of_range_is_named_at_once():
    with pytest.raises(ValueError, match=r"temperature is -1.*top_k is -2.*top_p is 0"):
        SamplingParams(temperature=-1, top_k=-2, top_p=0)
    with pytest.raises(ValueError, match="top_p is 1.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match="temperature is nan"):
        SamplingParams(temperature=math.nan)
