"""Loading a checkpoint without engines; training/test_faults.py resumes real ones."""

import random

import numpy as np
import pytest
import torch
from saved_checkpoints import save

from dschat.checkpoints.loading import load_checkpoint


@pytest.fixture(autouse=True)
def restored_generators():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def test_every_random_generator_is_restored(tmp_path):
    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.randn(()).item()]

    draw()  # an odd number of normal numbers leaves one cached in Python's and NumPy's generators
    folder = save(tmp_path, 1)
    expected = draw()
    draw()
    assert load_checkpoint(folder, engines={}, fingerprint={"rows": 7}) == {"step": 1, "rows": 7}
    assert draw() == expected


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    with pytest.raises(ValueError, match="rows was 7 and is 8.*--resume never"):
        load_checkpoint(folder, engines={}, fingerprint={"rows": 8})
