"""Weight files: validation and digests without loading a model from them, and which tensors are not finite."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from dschat.arguments.strict_json import read_json_object
from dschat.checkpoints.restricted_pickle import pickle_problems
from dschat.distributed import watchdog


def weight_problems(folder: str | Path) -> list[str]:
    """Validate the weight files of a model folder; lists damaged or missing files and pickles that contain code."""
    folder = Path(folder)
    problems, pickles = [], set(folder.glob("pytorch_model*.bin"))
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            problems.append(f"{path} is damaged or cut short ({error}): copy it again")
    for path in sorted([*folder.glob("*.safetensors.index.json"), *folder.glob("*.bin.index.json")]):
        try:
            index = read_json_object(path)
            shards = set(index["weight_map"].values())
            if not shards or "metadata" not in index:
                raise ValueError("it has no metadata, or names no file")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{path} cannot be read ({error}): copy it again")
            continue
        if not all(isinstance(name, str) and Path(name).name == name for name in shards):
            problems.append(f"{path} names files outside its folder: download the model again")
            continue
        pickles |= {folder / name for name in shards if not name.endswith(".safetensors") and (folder / name).is_file()}
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            problems.append(f"{folder} lacks {', '.join(missing)}, which {path.name} names: copy the missing files")
    if not list(folder.glob("*.safetensors")):
        for path in sorted(pickles):
            problems += pickle_problems(path)
    return problems


def nonfinite_tensors(folder: Path) -> list[tuple[str, str, str]]:
    """(file, tensor, "NaN" or "infinite") of every tensor in a model's weight files that is not finite."""
    problems = []
    for path in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin")):
        for name, tensor in _tensors_of(path):
            if tensor.is_floating_point() and not tensor.float().isfinite().all():
                problems.append((path.name, name, "NaN" if tensor.float().isnan().any() else "infinite"))
            watchdog.progress()
    return problems


def _tensors_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if path.suffix == ".bin":
        yield from torch.load(path, map_location="cpu", weights_only=True).items()
        return
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def weights_digest(path: str) -> str:
    """Identifies a model's weights and config: SHA-256 of a folder's files, or name@commit of a hub model."""
    if not Path(path).is_dir():
        return f"{path}@{Path(cached_file(path, 'config.json')).parent.name}"  # …/snapshots/COMMIT/config.json
    digest = hashlib.sha256()
    for file in sorted(Path(path).iterdir()):
        if file.name == "config.json" or file.suffix in (".safetensors", ".bin"):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as content:
                while block := content.read(1 << 24):
                    digest.update(block)
                    watchdog.progress()
    return digest.hexdigest()
