"""Load a DeepSpeed checkpoint with another world size, by converting it to a universal checkpoint."""

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
def converted_checkpoint(folder: Path, engines: Mapping[str, deepspeed.DeepSpeedEngine]) -> Iterator[Path]:
    """A temporary folder from which engines of any world size can load, removed at the end. A collective.

    It takes as much disk space as the checkpoint. ZeRO-0 state is replicated, so it is only copied.

    Raises:
        ValueError: DeepSpeed cannot convert the checkpoint.
    """
    temporary = folder.with_name(f".{folder.name}.universal")
    problem = None
    if collectives.is_main():
        shutil.rmtree(temporary, ignore_errors=True)
        for name, engine in engines.items():
            try:
                with watchdog.watch_folder(temporary):
                    _convert(folder / name, temporary / name, partitioned=engine.zero_optimization())
            except (AssertionError, OSError, RuntimeError, ValueError, KeyError) as error:
                problem = f"{folder} cannot be converted for {collectives.world_size()} processes ({name}: {error})"
    problem = collectives.all_gather_objects(problem)[0]
    try:
        if problem:
            raise ValueError(f"{problem}: start as many processes as its manifest.json has in world_size")
        for engine in engines.values():
            engine._config.load_universal_checkpoint = bool(engine.zero_optimization())
        yield temporary
        for engine in engines.values():  # DeepSpeed makes all parameters share one step tensor
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
