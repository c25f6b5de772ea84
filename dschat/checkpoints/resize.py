"""DeepSpeed's checkpoints for another number of processes than wrote them, by way of its universal checkpoints."""

from __future__ import annotations

import contextlib
import io
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal

from dschat.distributed import collectives, watchdog


@contextmanager
def converted(folder: Path, engines: Mapping[str, deepspeed.DeepSpeedEngine]) -> Iterator[Path]:
    """A folder from which engines of any number of processes can load, for as long as the context lasts. A collective.

    It takes as much room as the checkpoint. ZeRO-0 keeps everything on every rank, so that nothing has to be converted.

    Raises:
        ValueError: DeepSpeed cannot convert it.
    """
    temporary = folder.with_name(f".{folder.name}.universal")
    problem = None
    if collectives.is_main():
        shutil.rmtree(temporary, ignore_errors=True)
        for name, engine in engines.items():
            try:
                with watchdog.following(temporary):
                    _convert(folder / name, temporary / name, partitioned=engine.zero_optimization())
            except (AssertionError, OSError, RuntimeError, ValueError, KeyError) as error:
                problem = f"{folder} cannot be converted for {collectives.world_size()} processes ({name}: {error})"
    problem = collectives.all_gather_objects(problem)[0]
    try:
        if problem:
            raise ValueError(f"{problem}: start as many as its manifest.json says")
        for engine in engines.values():
            engine._config.load_universal_checkpoint = bool(engine.zero_optimization())
        yield temporary
        for engine in engines.values():  # DeepSpeed gives all parameters one and the same counter of steps
            for state in engine.basic_optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].clone()
    finally:
        for engine in engines.values():
            engine._config.load_universal_checkpoint = False
        collectives.barrier()
        if collectives.is_main():
            shutil.rmtree(temporary, ignore_errors=True)


def _convert(folder: Path, output: Path, *, partitioned: bool) -> None:
    if not partitioned:
        shutil.copytree(folder, output)
        return
    output.mkdir(parents=True)
    settings = Namespace(
        input_folder=str(folder), output_folder=str(output), num_extract_workers=1, num_merge_workers=1,
        keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        ds_to_universal.main(settings)
