"""Resumable checkpoints of a run: written beside, checksummed, renamed, and only then pointed at.

output_dir/checkpoints/step-00000120/
    manifest.json          step, world size, and size + SHA-256 of every other file
    state.json             what the step's loop needs to go on: its counters and positions
    random_rank0.…         the generators of each rank
    actor/, critic/, …     DeepSpeed's own checkpoint of each engine
output_dir/checkpoints/latest    the name of the newest complete one
"""

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file, save_file

from dschat import launch

Engines = Mapping[str, deepspeed.DeepSpeedEngine]
STEP_FOLDER = re.compile(r"step-\d{8}")


def save(
    output_dir: str | Path,
    step: int,
    *,
    engines: Engines,
    state: dict[str, Any],
    keep: int,
    also: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint of the whole run; every rank calls it.

    Args:
        step: number of finished steps; names the folder.
        engines: the trained engines by name.
        state: JSON-serialisable, the same on every rank.
        keep: older checkpoints beyond this many are removed, after the new one is complete. Those of later steps
            too: they belong to a run that was left.
        also: called on every rank with the temporary folder, to add files of its own (an EMA, say).

    Returns: the folder, complete and verified by its manifest.
    """
    folder = Path(output_dir, "checkpoints", f"step-{step:08d}")
    temporary = folder.with_name(f".{folder.name}.tmp")
    if launch.is_main():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    launch.barrier()
    for name, engine in engines.items():
        engine.save_checkpoint(str(temporary), tag=name, save_latest=False)
    if also is not None:
        also(temporary)
    _save_random_states(temporary)
    launch.barrier()
    if launch.is_main():
        (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        _write_manifest(temporary, step)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        _sync(folder.parent)
        _write_atomically(folder.parent / "latest", folder.name)
        folders = _step_folders(output_dir)
        newest = folders.index(folder)
        for other in folders[: max(newest + 1 - keep, 0)] + folders[newest + 1 :]:
            shutil.rmtree(other)
    launch.barrier()
    return folder


def find(output_dir: str | Path, resume: str) -> Path | None:
    """The checkpoint that `--resume` means: "never" → None; "auto" → the newest that verifies, or None; else the path.

    A collective: the main rank reads and decides for all.

    Raises: ValueError when the named checkpoint, or every one that "auto" found, does not verify.
    """
    if resume == "never":
        return None
    found, problem = None, None
    if launch.is_main():
        try:
            found = _find(output_dir, resume)
        except ValueError as error:
            problem = str(error)
    found, problem = launch.from_all_ranks((found, problem))[0]
    if problem:
        raise ValueError(problem)
    return found


def _find(output_dir: str | Path, resume: str) -> Path | None:
    if resume != "auto":
        problems = verify(resume)
        if problems:
            raise ValueError(f"--resume {resume} cannot be used: {'; '.join(problems[:5])}")
        return Path(resume)
    found = _step_folders(output_dir)
    for folder in reversed(found):
        problems = verify(folder)
        if not problems:
            return folder
        print(f"warning: {folder} is damaged and passed over ({'; '.join(problems[:3])})", flush=True)
    if found:
        raise ValueError(
            f"--resume auto: none of the {len(found)} checkpoints in {output_dir} verifies; --resume never starts anew"
        )
    return None


def verify(folder: str | Path) -> list[str]:
    """What is wrong with a checkpoint: missing files, other sizes or checksums, another world size. [] if nothing."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        files, world_size = manifest["files"], manifest["world_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"manifest.json cannot be read ({error})"]
    problems = []
    if world_size != launch.world_size():
        problems.append(
            f"it was written by {world_size} processes and this run has {launch.world_size()}: start as many"
        )
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        elif _digest(path) != digest:
            problems.append(f"{name} has another checksum")
    return problems


def load(folder: Path, *, engines: Engines, same: dict[str, Any]) -> dict[str, Any]:
    """Bring engines and generators back to where `save` found them; every rank calls it. Returns the saved state.

    Args:
        same: entries of the state that must be as they were when it was saved.

    Raises: ValueError when they are not, or when the checkpoint lacks an engine.
    """
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    changed = [f"{name} was {state.get(name)} and is {now}" for name, now in same.items() if state.get(name) != now]
    if changed:
        raise ValueError(
            f"{folder} belongs to another run, which cannot be gone on with: {'; '.join(changed)}. Resume with the "
            "settings and data of its run.json, or start anew with --resume never"
        )
    for name, engine in engines.items():
        path, _ = engine.load_checkpoint(str(folder), tag=name)
        if path is None:
            raise ValueError(f"{folder} holds no checkpoint of the {name}: was it written by another step?")
    _load_random_states(folder)
    return state


def _save_random_states(folder: Path) -> None:
    version, integers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(integers),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
    }
    if get_accelerator().device_name() != "cpu":
        tensors["device"] = get_accelerator().get_rng_state()
    rank = launch.rank()
    save_file(tensors, folder / f"random_rank{rank}.safetensors")
    numbers = {"python": [version, gauss], "numpy": [kind, position, has_gauss, cached]}
    (folder / f"random_rank{rank}.json").write_text(json.dumps(numbers), encoding="utf-8")


def _load_random_states(folder: Path) -> None:
    rank = launch.rank()
    tensors = load_file(folder / f"random_rank{rank}.safetensors")
    numbers = json.loads((folder / f"random_rank{rank}.json").read_text(encoding="utf-8"))
    version, gauss = numbers["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, position, has_gauss, cached = numbers["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if "device" in tensors:
        get_accelerator().set_rng_state(tensors["device"])


def _step_folders(output_dir: str | Path) -> list[Path]:
    return sorted(path for path in Path(output_dir, "checkpoints").glob("step-*") if STEP_FOLDER.fullmatch(path.name))


def _write_manifest(folder: Path, step: int) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        _sync(path)
        files[path.relative_to(folder).as_posix()] = (path.stat().st_size, _digest(path))
    manifest = {"step": step, "world_size": launch.world_size(), "files": files}
    _write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1))
    _sync(folder)


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    temporary.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
