"""Allocation in the KV pool, and which models the pool supports."""

import random

import pytest
from decoder_models import ARCHITECTURES, tiny

from dschat.generation.kv_pool.allocator import KVAllocator
from dschat.generation.kv_pool.pooled_model import PooledModel


def test_allocated_runs_never_overlap_and_freed_ones_merge():
    rng, runs, allocated = random.Random(3), KVAllocator(1, 200), {}
    for _ in range(3000):
        if allocated and rng.random() < 0.5:
            start = rng.choice(list(allocated))
            runs.free_run(start, allocated.pop(start))
        else:
            length = rng.randint(1, 30)
            start = runs.allocate(length)
            if start is not None:
                allocated[start] = length
        positions = [position for start, length in allocated.items() for position in range(start, start + length)]
        assert len(positions) == len(set(positions)) and all(1 <= position < 200 for position in positions)
        assert len(positions) + sum(length for _, length in runs.free) == 199
        assert all(a + b < c for (a, b), (c, _) in zip(runs.free, runs.free[1:], strict=False)), (
            "neighbours are one run"
        )
    for start, length in allocated.items():
        runs.free_run(start, length)
    assert runs.free == [(1, 199)] and runs.allocate(200) is None and runs.allocate(199) == 1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_pool_supports_every_tested_architecture_but_mamba(name):
    problem = PooledModel(tiny(name)).mismatch()
    assert (problem is None) == (name != "mamba"), problem


def test_a_window_that_attention_does_not_receive_is_not_supported(monkeypatch):
    """A trial of a dozen tokens cannot detect a window of thousands."""
    pooled = PooledModel(tiny("gemma2"))
    assert pooled.mismatch() is None
    problem = pooled._window_mismatch({0: None, 1: None}, False)  # no window that the trial could shorten
    assert "layers [0] do not pass the windows" in problem
    monkeypatch.setattr(pooled.model.config, "layer_types", ["chunked_attention", "full_attention"])
    assert "layers of chunked_attention" in pooled._window_mismatch({}, True)
