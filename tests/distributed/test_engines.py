"""An optimizer step does not depend on how the batch is split; the test itself is in engine_ranks.py."""

from pathlib import Path

import pytest
import torch

from dschat.distributed.engines import sum_metrics

RANKS = Path(__file__).with_name("engine_ranks.py")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_equals_plain_torch_on_the_whole_batch_for_every_zero_stage_and_split(processes, programs, tmp_path):
    text = programs.run(RANKS, [], processes=processes, log=tmp_path / "log")
    assert text.count("all equal") == processes


def test_metric_sums_keep_their_names_and_are_float64():
    values = {"a": torch.tensor(2**24 + 1), "b": torch.tensor([0.5])}
    assert sum_metrics(values) == {"a": 2.0**24 + 1, "b": 0.5}
    assert sum_metrics({}) == {}
