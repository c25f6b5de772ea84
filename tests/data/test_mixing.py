import numpy as np
import pytest

from dschat.data.mixing import assign, mixed_rows, parse_data_split, split_position

SHARES = (0.2, 0.4, 0.4)


def roles(rows, *, shares, phase, seed=7, eval_fraction=0.1):
    return [assign(i, seed=seed, shares=shares, phase=phase, eval_fraction=eval_fraction) for i in range(rows)]


def test_split_is_parsed_into_shares():
    assert parse_data_split("2,4,4") == pytest.approx(SHARES)
    assert parse_data_split("0,0,1") == (0, 0, 1)


@pytest.mark.parametrize("text", ["", "1,2", "1,2,3,4", "a,b,c", "-1,1,1", "0,0,0", "nan,1,1", "inf,1,1"])
def test_invalid_splits_are_refused(text):
    with pytest.raises(ValueError, match="three numbers"):
        parse_data_split(text)


@pytest.mark.parametrize("shares", [SHARES, (0.0, 0.5, 0.5), (1.0, 0.0, 0.0), (0.3, 0.7, 0.0), (1 / 3, 1 / 3, 1 / 3)])
def test_phases_are_disjoint_and_cover_every_row(shares):
    phases = [roles(2000, shares=shares, phase=phase) for phase in (1, 2, 3)]
    for row in zip(*phases, strict=True):
        assert sum(role is not None for role in row) == 1


@pytest.mark.parametrize("rows", [10, 11, 100, 1000])
def test_shares_are_met_for_few_rows_and_for_many(rows):
    """Positions from a rotation keep the count within a few rows of share · N (independent draws: √N)."""
    for seed in range(20):
        for phase, share in zip((1, 2, 3), SHARES, strict=True):
            count = sum(role is not None for role in roles(rows, shares=SHARES, phase=phase, seed=seed))
            assert abs(count - share * rows) <= 3
            assert count > 0


def test_held_out_rows_are_the_stated_share_of_every_phase():
    for phase in (1, 2, 3):
        of_phase = roles(5000, shares=SHARES, phase=phase)
        held_out = of_phase.count("eval") / (5000 - of_phase.count(None))
        assert held_out == pytest.approx(0.1, abs=0.005)
    assert roles(50, shares=None, phase=1, eval_fraction=0.0) == ["train"] * 50


def test_a_row_keeps_its_split_when_rows_are_appended_and_changes_it_with_the_seed():
    assert roles(100, shares=SHARES, phase=2) == roles(300, shares=SHARES, phase=2)[:100]
    assert roles(100, shares=SHARES, phase=2) != roles(100, shares=SHARES, phase=2, seed=8)


def test_positions_are_spread_evenly_over_zero_to_one():
    positions = np.array([split_position(i, seed=1) for i in range(1000)])
    counts, _ = np.histogram(positions, bins=10, range=(0, 1))
    assert positions.min() >= 0 and positions.max() < 1
    assert counts.min() >= 97 and counts.max() <= 103


def test_without_weights_every_row_occurs_once():
    rows = mixed_rows([3, 2], None, seed=0)
    assert [r.tolist() for r in rows] == [[0, 1, 2], [0, 1]]


def test_weights_are_fractions_of_an_epoch_as_long_as_all_sources_together():
    """10 + 90 rows, weights 0.7 and 0.3: 70 rows of the first (each seven times) and 30 different of the second."""
    first, second = mixed_rows([10, 90], [0.7, 0.3], seed=0)
    assert first.tolist() == sorted(list(range(10)) * 7)
    assert len(second) == len(set(second.tolist())) == 30 and second.max() < 90


def test_repeated_rows_differ_by_at_most_one_in_number():
    """7 rows of 10, weight 0.5 of 17: 8 or 9 picks, so one row or two come twice and none is left out."""
    first, second = mixed_rows([7, 10], [5, 5], seed=3)
    assert len(first) + len(second) == 17
    counts = np.bincount(first, minlength=7)
    assert counts.min() == 1 and counts.max() == 2


def test_mixture_depends_on_the_seed_alone():
    def mix(seed):
        return [r.tolist() for r in mixed_rows([10, 90], [0.7, 0.3], seed=seed)]

    assert mix(0) == mix(0) != mix(1)


def test_a_weight_on_an_empty_source_is_refused():
    with pytest.raises(ValueError, match="Source 2"):
        mixed_rows([5, 0], [1, 1], seed=0)
