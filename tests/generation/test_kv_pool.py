"""Allocation in the KV pool, and which models the pool supports."""

import random

import pytest
from test_generation import ARCHITECTURES, tiny

from dschat.generation.kv_pool.allocator import KVAllocator
from dschat.generation.kv_pool.pooled_model import PooledModel


def test_allocated_runs_never_overlap_and_freed_ones_merge():
    chooser, runs, held = random.Random(3), KVAllocator(1, 200), {}
    for _ in range(3000):
        if held and chooser.random() < 0.5:
            start = chooser.choice(list(held))
            runs.free_run(start, held.pop(start))
        else:
            length = chooser.randint(1, 30)
            start = runs.allocate(length)
            if start is not None:
                held[start] = length
        places = [place for start, length in held.items() for place in range(start, start + length)]
        assert len(places) == len(set(places)) and all(1 <= place < 200 for place in places)
        assert len(places) + sum(length for _, length in runs.free) == 199
        assert all(a + b < c for (a, b), (c, _) in zip(runs.free, runs.free[1:], strict=False)), (
            "neighbours are one run"
        )
    for start, length in held.items():
        runs.free_run(start, length)
    assert runs.free == [(1, 199)] and runs.allocate(200) is None and runs.allocate(199) == 1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_that_are_served(name):
    problem = PooledModel(tiny(name)).mismatch()
    assert (problem is None) == (name != "mamba"), problem


def test_a_window_that_attention_does_not_receive_is_not_supported(monkeypatch):
    """On a dozen tokens a window of thousands looks like none."""
    pooled = PooledModel(tiny("gemma2"))
    assert pooled.mismatch() is None
    problem = pooled._window_mismatch({0: None, 1: None}, False)  # no window that the trial could shorten
    assert "layers [0] do not pass the windows" in problem
    monkeypatch.setattr(pooled.model.config, "layer_types", ["chunked_attention", "full_attention"])
    assert "layers of chunked_attention" in pooled._window_mismatch({}, True)
