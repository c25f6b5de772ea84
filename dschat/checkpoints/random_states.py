"""Save and restore the random states of a rank."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file, save_file

from dschat.arguments.strict_json import read_json_object
from dschat.distributed import collectives


def save_random_states(folder: Path) -> None:
    """Write this rank's random states of Python, NumPy, torch and the device."""
    version, integers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(integers),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
    }
    if get_accelerator().device_name() != "cpu":
        tensors["device"] = get_accelerator().get_rng_state()
    rank = collectives.rank()
    save_file(tensors, folder / f"random_rank{rank}.safetensors")
    numbers = {"python": [version, gauss], "numpy": [kind, position, has_gauss, cached]}
    (folder / f"random_rank{rank}.json").write_text(json.dumps(numbers), encoding="utf-8")


def load_random_states(folder: Path) -> None:
    """Restore the states that `save_random_states` wrote."""
    rank = collectives.rank()
    tensors = load_file(folder / f"random_rank{rank}.safetensors")
    numbers = read_json_object(folder / f"random_rank{rank}.json")
    version, gauss = numbers["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, position, has_gauss, cached = numbers["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if "device" in tensors:
        get_accelerator().set_rng_state(tensors["device"])
