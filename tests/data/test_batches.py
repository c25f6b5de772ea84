import math
from collections import Counter

import numpy as np
import pytest

from dschat.data.batches import GlobalBatches, rank_share

LENGTHS = np.random.default_rng(0).integers(1, 100, size=103)


def flat(batches):
    return [row for batch in batches for row in batch]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("group_by_length", [True, False])
def test_every_row_occurs_once_or_is_counted_as_dropped(shuffle, group_by_length):
    options = {"global_batch_size": 10, "seed": 1, "shuffle": shuffle, "group_by_length": group_by_length}
    complete = GlobalBatches(LENGTHS, drop_last=False, **options)
    assert sorted(flat(complete.epoch(0))) == list(range(103))
    assert [len(batch) for batch in complete.epoch(0)] == [10] * 10 + [3]
    assert len(complete) == 11 and complete.dropped_per_epoch == 0
    dropping = GlobalBatches(LENGTHS, **options)
    assert [len(batch) for batch in dropping.epoch(0)] == [10] * 10
    assert len(dropping) == 10 and dropping.dropped_per_epoch == 3
    assert max(Counter(flat(dropping.epoch(0))).values()) == 1


def test_shuffled_epochs_differ_repeat_and_drop_other_rows():
    def batches(seed):
        return GlobalBatches(LENGTHS, global_batch_size=10, seed=seed)

    assert batches(1).epoch(0) == batches(1).epoch(0)
    assert batches(1).epoch(0) != batches(1).epoch(1)
    assert batches(1).epoch(0) != batches(2).epoch(0)
    dropped = [set(range(103)) - set(flat(batches(1).epoch(epoch))) for epoch in range(3)]
    assert dropped[0] != dropped[1] != dropped[2]


def test_order_of_the_file_is_kept_without_shuffling_and_grouping():
    plain = {"shuffle": False, "group_by_length": False, "drop_last": False}
    batches = GlobalBatches(LENGTHS, global_batch_size=10, seed=1, **plain)
    assert flat(batches.epoch(3)) == list(range(103))


def test_grouping_by_length_saves_padding_and_mixes_the_steps():
    def padding(group_by_length):
        batches = GlobalBatches(LENGTHS, global_batch_size=10, seed=1, group_by_length=group_by_length).epoch(0)
        return sum(max(LENGTHS[batch]) * len(batch) - LENGTHS[batch].sum() for batch in batches)

    assert padding(True) < 0.2 * padding(False)
    longest = [max(LENGTHS[batch]) for batch in GlobalBatches(LENGTHS, global_batch_size=10, seed=1).epoch(0)]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 7, 12])
def test_ranks_share_every_row_of_a_step_in_equal_numbers_of_micro_batches(world_size, micro_batch_size, rows):
    step = [100 + i for i in range(rows)]
    shares = [
        rank_share(step, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
        for rank in range(world_size)
    ]
    assert sorted(row for share in shares for micro in share for row in micro) == step
    assert len({len(share) for share in shares}) == 1
    assert max(len(micro) for share in shares for micro in share) <= micro_batch_size
    # as few micro-batches as the rank with most rows needs
    assert len(shares[0]) == math.ceil(math.ceil(rows / world_size) / micro_batch_size)


def test_long_rows_are_distributed_over_all_ranks():
    step = [0, 1, 2, 3]  # longest first
    assert rank_share(step, rank=0, world_size=2, micro_batch_size=2) == [[0, 2]]
    assert rank_share(step, rank=1, world_size=2, micro_batch_size=2) == [[1, 3]]


def test_missing_rows_give_empty_micro_batches():
    assert rank_share([5, 6, 7], rank=1, world_size=2, micro_batch_size=1) == [[6], []]


def test_the_error_for_too_few_rows_names_the_flags_to_change():
    with pytest.raises(ValueError, match="3 rows, but one step needs 4.*per_device_train_batch_size"):
        GlobalBatches([1, 2, 3], global_batch_size=4, seed=0)
    with pytest.raises(ValueError, match="0 rows"):
        GlobalBatches([], global_batch_size=4, seed=0, drop_last=False)
    assert GlobalBatches([1, 2, 3], global_batch_size=4, seed=0, drop_last=False).epoch(0) == [[2, 1, 0]]


def test_ranks_and_batch_sizes_out_of_range_are_refused():
    with pytest.raises(ValueError, match="rank 2 of 2"):
        rank_share([1], rank=2, world_size=2, micro_batch_size=1)
    with pytest.raises(ValueError, match="micro_batch_size 0"):
        rank_share([1], rank=0, world_size=1, micro_batch_size=0)
    with pytest.raises(ValueError, match="at least 1"):
        GlobalBatches([1], global_batch_size=0, seed=0)


def test_steps_number_the_batches_of_successive_epochs():
    batches = GlobalBatches(LENGTHS, global_batch_size=10, seed=1)
    assert [batches.step(step) for step in range(20)] == batches.epoch(0) + batches.epoch(1)
    assert batches.step(3) == batches.epoch(0)[3]
