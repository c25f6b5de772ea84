"""Files of weights, looked at before anything is loaded from them."""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from dschat import watchdog

# What DeepSpeed's checkpoints name beside what torch itself allows. Everything else could run code when it is loaded.
HARMLESS = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)


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


def weights_digest(path: str) -> str:
    """A name of a model's weights and configuration: the content of a folder's files, the commit of a hub name."""
    if not Path(path).is_dir():
        return f"{path}@{AutoConfig.from_pretrained(path)._commit_hash}"
    digest = hashlib.sha256()
    for file in sorted(Path(path).iterdir()):
        if file.name == "config.json" or file.suffix in (".safetensors", ".bin"):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as content:
                while block := content.read(1 << 24):
                    digest.update(block)
                    watchdog.progress()
    return digest.hexdigest()


def pickle_problems(path: Path) -> list[str]:
    """Why a file that torch.save wrote must not be loaded: it names things that are no tensors. Nothing is executed."""
    try:
        unsafe = [name for name in torch.serialization.get_unsafe_globals_in_checkpoint(path) if name not in HARMLESS]
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, EOFError) as error:
        return [f"{path} cannot be read as a file of torch.save ({error})"]
    if unsafe:
        return [f"{path} would run {', '.join(unsafe[:3])} when it is loaded: it is refused. Get safetensors instead"]
    return []
