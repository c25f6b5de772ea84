"""Data parallel and sequence parallel groups of four processes."""

import json
from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("groups_ranks.py")


@pytest.fixture(scope="module")
def results(programs, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("groups")
    programs.run(RANKS, [folder / "results.json"], processes=4, log=folder / "log")
    return json.loads((folder / "results.json").read_text())


def test_without_sequence_parallelism_every_rank_reads_its_own_rows(results):
    for rank, result in enumerate(results):
        assert result["1"] == [rank, 4, 0, 1, 10.0**rank, 10.0**rank]  # sums over all ranks; own value


def test_adjacent_ranks_share_rows_and_ranks_of_the_same_part_form_data_parallel_groups(results):
    # Sequence parallel pairs (0, 1) and (2, 3); data parallel pairs (0, 2) and (1, 3).
    sums = {0: (101.0, 11.0), 1: (1010.0, 11.0), 2: (101.0, 1100.0), 3: (1010.0, 1100.0)}
    for rank, result in enumerate(results):
        assert result["2"] == [rank // 2, 2, rank % 2, 2, *sums[rank]]
        assert result["4"] == [0, 1, rank, 4, 10.0**rank, 1111.0]


def test_a_size_that_does_not_divide_the_world_is_refused(results):
    assert all(result["3"] == "sequence_parallel_size 3 must divide the 4 processes of the run" for result in results)
