"""Files of weights, looked at before anything is loaded from them."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

# What a checkpoint of weights, or of DeepSpeed's optimizer, needs of Python. Everything else a pickle may name could
# run code when it is loaded.
HARMLESS = ("torch.", "torch", "collections.", "numpy.", "deepspeed.", "_codecs.encode", "argparse.Namespace")


def weight_problems(folder: str | Path) -> list[str]:
    """What makes the weights of a model folder unusable: damaged or missing files, pickles that carry code."""
    folder = Path(folder)
    problems = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            problems.append(f"{path} is damaged or cut short ({error}): copy it again")
    for path in sorted([*folder.glob("*.safetensors.index.json"), *folder.glob("*.bin.index.json")]):
        try:
            shards = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{path} cannot be read ({error}): copy it again")
            continue
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            problems.append(f"{folder} lacks {', '.join(missing)}, which {path.name} names: copy the missing files")
    if not list(folder.glob("*.safetensors")):
        for path in sorted(folder.glob("pytorch_model*.bin")):
            problems += pickle_problems(path)
    return problems


def pickle_problems(path: Path) -> list[str]:
    """Why a file that torch.save wrote must not be loaded: it names things that are no tensors. Nothing is executed."""
    try:
        unsafe = [name for name in _named(path) if not name.startswith(HARMLESS) or "os." in name]
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, EOFError) as error:
        return [f"{path} cannot be read as a file of torch.save ({error})"]
    if unsafe:
        return [f"{path} would run {', '.join(unsafe[:3])} when it is loaded: it is refused. Get safetensors instead"]
    return []


def _named(path: Path) -> Iterator[str]:
    """What the pickle in a file names, apart from the tensors that torch allows."""
    yield from torch.serialization.get_unsafe_globals_in_checkpoint(path)
