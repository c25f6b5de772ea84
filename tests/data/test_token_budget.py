"""Token budgets against laws that hold for any rows, over random trials."""

import random
from collections.abc import Sequence

import pytest

from dschat.data.token_budget import (
    Unit,
    balance_over_ranks,
    fewest,
    rows_as_units,
    split_padded,
    split_units,
)

TRIALS = range(60)


def random_rows(trial: random.Random) -> tuple[list[int], list[tuple[list[int], int]], int]:
    """Lengths, groups of rows with a common prompt, and a budget that some rows may exceed alone."""
    lengths, prompts = [], []
    for _ in range(trial.randint(1, 8)):
        prompt, size = trial.randint(1, 40), trial.choice([1, 1, 2, 4, 9])
        rows = range(len(lengths), len(lengths) + size)
        lengths += [prompt + trial.randint(0, 60) for _ in rows]
        if size > 1:
            prompts.append((list(rows), prompt))
    order = trial.sample(range(len(lengths)), len(lengths))
    place = {row: i for i, row in enumerate(order)}
    lengths = [lengths[row] for row in order]
    prompts = [(sorted(place[row] for row in rows), prompt) for rows, prompt in prompts]
    return lengths, prompts, trial.randint(20, 2 * sum(lengths) // 3 + 20)


def packed_tokens(rows: Sequence[int], lengths: Sequence[int], prompts: Sequence[tuple[Sequence[int], int]]) -> int:
    """What a packed row of these rows holds: each prompt once, counted token by token."""
    total = sum(lengths[row] for row in rows)
    for members, prompt in prompts:
        total -= prompt * max(0, len(set(rows) & set(members)) - 1)
    return total


@pytest.mark.parametrize("seed", TRIALS)
def test_no_micro_batch_exceeds_the_budget_unless_a_single_row_does_and_every_row_occurs_once(seed):
    trial = random.Random(seed)
    lengths, prompts, budget = random_rows(trial)
    units = rows_as_units(lengths, prompts=prompts, budget=budget)
    least = fewest(units, budget)
    for count in (None, least, least + 1, 2 * least + 3):
        parts = split_units(units, budget, count=count, quadratic=trial.choice([0.0, 0.01]))
        assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
        assert all(part == sorted(part) for part in parts)
        assert len(parts) == (count or least)
        assert all(parts[: min(len(parts), len(units))]), "a micro-batch without rows although there are enough units"
        for part in parts:
            assert packed_tokens(part, lengths, prompts) <= budget or len(part) == 1, (part, budget)
    with pytest.raises(ValueError, match=f"need {least} micro-batches of {budget} tokens, not {least - 1}"):
        split_units(units, budget, count=least - 1)


@pytest.mark.parametrize("seed", TRIALS)
def test_a_unit_costs_its_prompt_once_and_large_groups_are_split_only_where_the_budget_ends(seed):
    lengths, prompts, budget = random_rows(random.Random(seed))
    units = rows_as_units(lengths, prompts=prompts, budget=budget)
    assert sorted(row for unit in units for row in unit.rows) == list(range(len(lengths)))
    group_of = {row: number for number, (rows, _) in enumerate(prompts) for row in rows}
    for unit in units:
        assert unit.tokens == packed_tokens(unit.rows, lengths, prompts)
        assert len({group_of.get(row, -1 - row) for row in unit.rows}) == 1, "rows without a common prompt"
    for rows, _ in prompts:
        own = [unit for unit in units if set(unit.rows) <= set(rows)]
        whole = packed_tokens(rows, lengths, prompts)
        assert (len(own) == 1) == (whole <= budget or len(rows) == 1)
        for unit in own:  # no two parts of a group fit together
            for other in own:
                both = packed_tokens([*unit.rows, *other.rows], lengths, prompts)
                assert unit is other or both > budget


@pytest.mark.parametrize("seed", TRIALS)
def test_first_fit_decreasing_needs_few_micro_batches(seed):
    """Units of at most a quarter of the budget fill three quarters of each micro-batch but the last."""
    trial = random.Random(seed)
    budget = 100
    units = [Unit((row,), trial.randint(1, 25)) for row in range(trial.randint(1, 60))]
    bound = -(-sum(unit.tokens for unit in units) // budget)
    assert bound <= fewest(units, budget) <= sum(unit.tokens for unit in units) // 75 + 1


def best_makespan(costs: list[int], ranks: int) -> int:
    """By trying all assignments."""
    best = [sum(costs)]

    def assign(i: int, loads: list[int]) -> None:
        if max(loads) >= best[0]:
            return
        if i == len(costs):
            best[0] = max(loads)
            return
        for load in set(loads):
            rank = loads.index(load)
            assign(i + 1, [*loads[:rank], load + costs[i], *loads[rank + 1 :]])

    assign(0, [0] * ranks)
    return best[0]


@pytest.mark.parametrize("seed", TRIALS)
def test_ranks_are_balanced_within_four_thirds_of_the_optimum(seed):
    trial = random.Random(seed)
    ranks, quadratic = trial.randint(1, 4), trial.choice([0.0, 1.0])
    lengths = [trial.randint(1, 50) for _ in range(trial.randint(1, 9))]
    shares = balance_over_ranks(lengths, ranks, quadratic=quadratic)
    assert len(shares) == ranks and sorted(row for share in shares for row in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    assert sum(map(bool, shares)) == min(ranks, len(lengths)), "an idle rank although there are enough rows"
    costs = [int(length + quadratic * length**2) for length in lengths]
    longest = max(sum(costs[row] for row in share) for share in shares)
    assert 3 * longest <= 4 * best_makespan(costs, ranks)


def test_attention_makes_one_long_row_as_expensive_as_many_short_ones():
    """100 + 100² = 10100 against 20 · (10 + 10²) = 2200: the long row is alone; by tokens alone it would not be."""
    lengths = [100] + [10] * 20
    assert balance_over_ranks(lengths, 2, quadratic=1.0)[0] == [0]
    assert len(balance_over_ranks(lengths, 2)[0]) == 6  # 150 tokens on each
    units = rows_as_units(lengths, budget=1000)
    assert [0] in split_units(units, 1000, count=2, quadratic=1.0)


def test_micro_batches_are_as_equal_as_their_number_allows():
    """12 rows of 10 tokens in 3 micro-batches: 4 each, although 100 tokens would fit into the first two."""
    units = rows_as_units([10] * 12, budget=100)
    assert [len(part) for part in split_units(units, 100, count=3)] == [4, 4, 4]
    assert [len(part) for part in split_units(units, 100)] == [6, 6]


@pytest.mark.parametrize("seed", TRIALS)
def test_rectangles_hold_every_row_once_and_stay_within_the_budget(seed):
    trial = random.Random(seed)
    lengths = [trial.randint(1, 60) for _ in range(trial.randint(1, 30))]
    budget = trial.randint(20, 400)
    least = len(split_padded(lengths, budget))
    for count in (None, least, least + 2, len(lengths) + 3):
        if count is not None and count < least:
            continue
        parts = split_padded(lengths, budget, count=count)
        assert len(parts) == (count or least)
        assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
        for part in parts:
            width = max((lengths[row] for row in part), default=0)
            assert len(part) <= 1 or len(part) * width <= budget
        by_length = sorted(filter(None, parts), key=lambda part: -max(lengths[row] for row in part))
        for longer, shorter in zip(by_length, by_length[1:], strict=False):
            assert min(lengths[row] for row in longer) >= max(lengths[row] for row in shorter), "rows of other lengths"
    if least > 1:
        with pytest.raises(ValueError, match=f"need {least} micro-batches"):
            split_padded(lengths, budget, count=least - 1)


def test_a_budget_is_not_exceeded_by_one_token_for_the_sake_of_balance():
    """Longest to cheapest ends at 5 4 | 5 3, where 3 more tokens fit nowhere; first-fit-decreasing: 5 5 | 4 3 3."""
    units = rows_as_units([5, 5, 4, 3, 3], budget=10)
    assert sorted(split_units(units, 10)) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("seed", range(20))
def test_equal_inputs_are_cut_equally_on_every_rank(seed):
    """Ranks cut independently: the order in which units are given must not matter either."""
    trial = random.Random(seed)
    lengths, prompts, budget = random_rows(trial)
    if seed % 2:  # ties
        lengths, prompts, budget = [trial.choice([10, 20]) for _ in range(12)], [], 70
    units = rows_as_units(lengths, prompts=prompts, budget=budget)
    shuffled = trial.sample(units, len(units))
    count = fewest(units, budget) + 1
    assert fewest(shuffled, budget) == count - 1
    assert split_units(shuffled, budget, count=count) == split_units(units, budget, count=count)
    assert rows_as_units(lengths, prompts=prompts, budget=budget) == units
    assert balance_over_ranks(lengths, 3) == balance_over_ranks(list(lengths), 3)
    assert split_padded(lengths, budget) == split_padded(list(lengths), budget)
