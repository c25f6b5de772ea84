"""Experiences are split and distributed without losing a token, identically on any number of ranks."""

from dataclasses import fields

import pytest
import torch

from dschat.rlhf.experience import Experience, MinibatchShuffle, MiniDataset

PER_ROW = ("sequences", "attention_mask", "response_mask", "scores", "has_score", "ended", "trained")
PER_TOKEN = [f.name for f in fields(Experience) if f.name not in PER_ROW]


def experience(names: list[int], prompts: list[int], responses: list[int], *, wider: tuple[int, int] = (0, 0)):
    """Row i has prompts[i] and responses[i] tokens; every value encodes the row's name and its position in the row.

    wider: padding columns beyond the longest prompt and response. Padding holds -1 or NaN.
    """
    count, width, length = len(names), max(prompts) + wider[0], max(responses) + wider[1]
    sequences = torch.full((count, width + length), -1)
    attention = torch.zeros(count, width + length, dtype=torch.bool)
    mask = torch.zeros(count, length, dtype=torch.bool)
    per_token = {name: torch.full((count, length), torch.nan) for name in PER_TOKEN}
    for row, (name, prompt, response) in enumerate(zip(names, prompts, responses, strict=True)):
        attention[row, width - prompt : width + response] = mask[row, :response] = True
        sequences[row, width - prompt : width + response] = 100 * name + torch.arange(prompt + response)
        for number, values in enumerate(per_token.values()):
            values[row, :response] = 1000.0 * number + 100 * name + torch.arange(response)
    return Experience(
        sequences=sequences,
        attention_mask=attention,
        response_mask=mask,
        scores=torch.tensor(names) / 7,
        ended=torch.tensor([name % 2 == 0 for name in names]),
        has_score=torch.ones(count, dtype=torch.bool),
        trained=torch.ones(count, dtype=torch.bool),
        **per_token,
    )


def compact(part: Experience) -> dict[float, dict[str, list]]:
    """Every row without its padding, by its name."""
    rows = {}
    prompt = part.sequences.shape[1] - part.response_mask.shape[1]
    for row in range(len(part)):
        mask, attention = part.response_mask[row], part.attention_mask[row]
        assert torch.equal(attention[prompt:], mask)
        rows[round(float(part.scores[row]) * 7)] = {
            "sequences": part.sequences[row][attention].tolist(),
            "prompt": int(attention[:prompt].sum()),
            "ended": bool(part.ended[row]),
            **{name: getattr(part, name)[row][mask].tolist() for name in PER_TOKEN},
        }
    return rows


def test_selected_rows_keep_every_token_and_drop_common_padding():
    whole = experience([1, 2, 3, 4], [5, 2, 3, 1], [1, 4, 2, 6], wider=(2, 1))
    part = whole.rows([2, 1])
    assert part.sequences.shape == (2, 3 + 4) and part.response_mask.shape == (2, 4)
    assert compact(part) == {name: row for name, row in compact(whole).items() if name in (2, 3)}
    assert list(compact(part)) == [3, 2], "in the requested order"
    assert compact(whole.rows(range(1, 3))) == compact(part)


def test_selected_rows_keep_masked_columns_between_response_columns():
    whole = experience([1, 2], [2, 3], [4, 4])
    whole.response_mask[:, 1] = False  # text that the model did not write
    whole.attention_mask[:, 4] = False
    part = whole.rows([0, 1])
    assert part.response_mask.tolist() == [[True, False, True, True]] * 2
    assert part.returns[0, 3] == whole.returns[0, 3]


def test_responses_of_one_token_and_of_none_can_be_selected():
    part = experience([1, 2], [2, 2], [1, 3]).rows([0])
    assert part.response_mask.tolist() == [[True]]
    part.response_mask[:] = False
    assert part.rows([0]).response_mask.tolist() == [[False]]


def test_concatenating_keeps_every_token_and_masks_the_new_padding():
    parts = [experience([1, 2], [2, 4], [3, 1]), experience([3], [1], [5]), experience([4, 5], [6, 2], [2, 2])]
    whole = Experience.concatenate(parts)
    assert whole.sequences.shape == (5, 6 + 5)
    assert compact(whole) == {name: row for part in parts for name, row in compact(part).items()}
    assert list(compact(whole)) == [1, 2, 3, 4, 5]


def test_the_loss_mask_is_the_response_mask_after_the_prompt_columns():
    part = experience([1, 2], [2, 4], [3, 1])
    assert part.loss_mask.tolist() == [[False] * 4 + [True] * 3, [False] * 4 + [True] + [False] * 2]


def one_process(minibatch_size: int, *, group_size: int = 1) -> MinibatchShuffle:
    return MinibatchShuffle(minibatch_size=minibatch_size, rank=0, world_size=1, seed=0, group_size=group_size)


def rows_by_minibatch(world_size: int, *, iteration: int = 0, seed: int = 5, whiten: bool = False, minibatch: int = 8):
    """Names of the rows in each minibatch of all ranks together, for 24 rows in 3 rollout batches and 2 epochs."""
    by_rank = []
    for rank in range(world_size):
        dataset = MiniDataset(
            MinibatchShuffle(minibatch_size=minibatch // world_size, rank=rank, world_size=world_size, seed=seed),
            generation_batches=3, ppo_epochs=2, whiten_advantages=whiten,
        )  # fmt: skip
        own_rows = list(range(rank, 24, world_size))  # as rank_share assigns them
        size = len(own_rows) // 3
        for number in range(3):
            names = own_rows[number * size : (number + 1) * size]
            lengths = [1 + name % 4 for name in names]
            minibatches = dataset.add(experience(names, lengths, lengths[::-1]), iteration=iteration)
            assert (minibatches is None) == (number < 2)
        by_rank.append([list(compact(part)) for part in minibatches])
    return [sorted(name for part in step for name in part) for step in zip(*by_rank, strict=True)]


def test_every_row_is_in_one_minibatch_of_each_epoch():
    steps = rows_by_minibatch(1)
    assert [len(step) for step in steps] == [8] * 6
    assert sorted(sum(steps[:3], [])) == sorted(sum(steps[3:], [])) == list(range(24))


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_same_rows_share_a_minibatch_on_any_number_of_ranks(world_size):
    assert rows_by_minibatch(world_size) == rows_by_minibatch(1)


def test_the_shuffle_depends_on_epoch_iteration_and_seed_and_on_nothing_else():
    steps = rows_by_minibatch(1)
    assert steps[:3] != steps[3:]
    assert rows_by_minibatch(1) == steps
    assert rows_by_minibatch(1, iteration=1) != steps
    assert rows_by_minibatch(1, seed=6) != steps


def test_rows_of_any_two_lanes_can_share_a_minibatch():
    # Row i is in lane i mod 8, so rows 0 and 8 never meet, but 0 meets 1 and 9 and 17 in some iteration.
    met = {
        name
        for iteration in range(40)
        for step in rows_by_minibatch(1, iteration=iteration)
        if 0 in step
        for name in step
    }
    assert met == set(range(24)) - {8, 16}


def test_a_complete_rollout_is_returned_once_and_clears_the_buffer():
    dataset = MiniDataset(one_process(2), generation_batches=2, ppo_epochs=1, whiten_advantages=False)
    first, second = experience([1, 2], [1, 1], [1, 1]), experience([3, 4], [1, 1], [1, 1])
    assert dataset.add(first) is None
    assert len(dataset.add(second)) == 2
    assert dataset.add(first) is None
    names = sorted(name for part in dataset.add(first) for name in compact(part))
    assert names == [1, 1, 2, 2]


def test_advantages_are_whitened_over_all_tokens_of_all_rollout_batches_and_nothing_else_changes():
    dataset = MiniDataset(one_process(2), generation_batches=2, ppo_epochs=1)
    parts = [experience([1, 2], [1, 1], [1, 2]), experience([3, 4], [2, 1], [3, 1])]
    originals = [part.advantages.clone() for part in parts]
    values = torch.cat([part.advantages[part.response_mask] for part in parts]).double()
    dataset.add(parts[0])
    minibatches = dataset.add(parts[1])
    rows = {name: row for part in minibatches for name, row in compact(part).items()}
    before = {name: row for part in parts for name, row in compact(part).items()}
    actual = torch.tensor([value for name in (1, 2, 3, 4) for value in rows[name]["advantages"]]).double()
    # Population variance; the epsilon of 1e-8 is negligible beside a variance of 1e4.
    torch.testing.assert_close(actual, (values - values.mean()) / values.var(correction=0).sqrt(), atol=1e-5, rtol=1e-5)
    for name, row in rows.items():
        assert {**row, "advantages": 0} == {**before[name], "advantages": 0}
    for part, original in zip(parts, originals, strict=True):
        torch.testing.assert_close(part.advantages, original, equal_nan=True)  # the caller's tensors are unchanged


def test_a_rollout_that_does_not_divide_into_minibatches_is_refused_naming_the_flags():
    dataset = MiniDataset(one_process(2), generation_batches=1, ppo_epochs=1)
    with pytest.raises(
        ValueError,
        match="3 sequences per device, in groups of 1, cannot be cut into minibatches of 2.*batch_size",
    ):
        dataset.add(experience([1, 2, 3], [1, 1, 1], [1, 1, 1]))


# --- groups ----------------------------------------------------------------------------------------------------------


def groups_by_minibatch(world_size: int, *, prompts: int, size: int, lanes: int, batches: int, iteration: int = 0):
    """(prompt, sample) of every row, rank by rank, in each minibatch of 2 epochs; a row's name holds both.

    lanes: groups of a minibatch, all ranks together.
    """
    by_rank = []
    for rank in range(world_size):
        dataset = MiniDataset(
            MinibatchShuffle(
                minibatch_size=lanes // world_size * size, rank=rank, world_size=world_size, seed=5, group_size=size
            ),
            generation_batches=batches, ppo_epochs=2, whiten_advantages=False,
        )  # fmt: skip
        own_prompts = list(range(rank, prompts, world_size))  # as rank_share assigns them
        share = len(own_prompts) // batches
        for number in range(batches):
            names = [p * size + j for p in own_prompts[number * share : (number + 1) * share] for j in range(size)]
            lengths = [1 + name % 3 for name in names]
            minibatches = dataset.add(experience(names, lengths, lengths[::-1]), iteration=iteration)
        by_rank.append([[divmod(name, size) for name in compact(part)] for part in minibatches])
    return [list(step) for step in zip(*by_rank, strict=True)]


@pytest.mark.parametrize(
    ("prompts", "size", "lanes", "batches"), [(24, 3, 8, 3), (16, 2, 4, 1), (8, 4, 8, 2), (12, 5, 4, 1), (48, 2, 8, 3)]
)
def test_groups_stay_whole_in_every_minibatch_and_on_their_rank(prompts, size, lanes, batches):
    for iteration in range(3):
        outcomes = []
        for world_size in (1, 2, 4):
            steps = groups_by_minibatch(
                world_size, prompts=prompts, size=size, lanes=lanes, batches=batches, iteration=iteration
            )
            assert len(steps) == 2 * prompts // lanes
            for step in steps:
                for rank, rows in enumerate(step):
                    assert len(rows) == lanes // world_size * size
                    for first in range(0, len(rows), size):  # all samples of one prompt, in their order
                        group = rows[first : first + size]
                        assert group == [(group[0][0], sample) for sample in range(size)]
                        assert group[0][0] % world_size == rank
            for epoch in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
                every = sorted(row for step in epoch for rows in step for row in rows)
                assert every == [(prompt, sample) for prompt in range(prompts) for sample in range(size)]
            outcomes.append([sorted(row for rows in step for row in rows) for step in steps])
        assert outcomes[0] == outcomes[1] == outcomes[2], "the same groups share a minibatch on any number of ranks"


def test_minibatches_that_would_split_a_group_are_refused():
    dataset = MiniDataset(one_process(4, group_size=3), generation_batches=1, ppo_epochs=1)
    with pytest.raises(ValueError, match="12 sequences per device, in groups of 3.*minibatches of 4 with whole groups"):
        dataset.add(experience(list(range(12)), [1] * 12, [1] * 12))


def test_whitening_ignores_untrained_responses():
    dataset = MiniDataset(one_process(3), generation_batches=1, ppo_epochs=1)
    part = experience([1, 2, 3], [1, 1, 1], [2, 1, 3])
    part.trained[1] = False
    part.advantages[1] = torch.nan
    trained = torch.cat([part.advantages[0, :2], part.advantages[2, :3]]).double()
    (minibatch,) = dataset.add(part)
    actual = minibatch.advantages[minibatch.trained_mask].double().sort().values
    torch.testing.assert_close(
        actual, ((trained - trained.mean()) / trained.std(correction=0)).sort().values, atol=1e-5, rtol=0
    )
