"""Save resumable checkpoints: written to a temporary folder, checksummed, renamed, then named in `latest`.

output_dir/checkpoints/step-00000120/
    manifest.json          step, world size, arguments, versions, and size + SHA-256 of every other file
    state.json             state of the training loop: its counters and positions in the data
    random_rank0.…         random states of each rank
    actor/, critic/, …     DeepSpeed's own checkpoint of each engine
output_dir/checkpoints/latest    the name of the newest complete checkpoint
"""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed

from dschat.checkpoints.disk_space import check_space, expected_bytes
from dschat.checkpoints.earlier_runs import step_folders
from dschat.checkpoints.random_states import save_random_states
from dschat.checkpoints.verified_folder import digests, sync, sync_all, write_atomically
from dschat.checkpoints.write_errors import WriteErrors
from dschat.distributed import collectives, failpoint, watchdog

Engines = Mapping[str, deepspeed.DeepSpeedEngine]


def save_checkpoint(
    output_dir: str | Path,
    step: int,
    *,
    update: int = 0,
    engines: Engines,
    state: dict[str, Any],
    keep: int,
    metadata: Mapping[str, Any] | None = None,
    extra_writer: Callable[[Path], Any] | None = None,
    run_in_background: Callable[[Callable[[], None]], None] | None = None,
) -> Path:
    """Write a checkpoint of the whole run; a collective.

    If killed at any moment, earlier checkpoints remain intact.

    Args:
        step: number of finished steps; names the folder.
        update: number of finished updates of the step after it.
        engines: the trained engines by name.
        state: JSON-serialisable, the same on every rank.
        keep: number of checkpoints to keep; older ones are removed once the new one is complete, and so are those of
            later steps, which belong to an abandoned run.
        metadata: added to the manifest, for users and `changed_arguments`.
        extra_writer: called on every rank with the temporary folder, to add further files (an EMA, say).
        run_in_background: called on the main rank with the remaining work (checksums, renaming, removal of older
            checkpoints) once all files are on disk and no longer written. None: it is done before this returns.

    Returns: the folder; complete, or completed later by the background work.
    Raises: OSError on every rank if any rank cannot write; the temporary folder is removed.
    """
    folder = Path(output_dir, "checkpoints", f"step-{step:08d}" + (f"-update-{update:04d}" if update else ""))
    temporary = folder.with_name(f".{folder.name}.tmp")
    errors = WriteErrors(temporary, content="the checkpoint")
    if collectives.is_main():
        errors.attempt(lambda: _create_temporary(temporary, engines))
    errors.raise_on_all_ranks()
    failpoint.reached("save_begin")
    _write_engines(engines, temporary, errors)
    if extra_writer is not None:
        errors.raise_on_all_ranks()  # it may contain collectives: no rank may skip it alone
        errors.attempt(lambda: extra_writer(temporary))
    errors.attempt(lambda: save_random_states(temporary))
    failpoint.reached("save_written")
    errors.raise_on_all_ranks()
    if collectives.is_main():
        errors.attempt(lambda: write_atomically(temporary / "state.json", json.dumps(state, indent=1)))
    errors.raise_on_all_ranks()
    if collectives.is_main_of_node():  # dirty pages are on the node that wrote the file
        errors.attempt(lambda: sync_all(temporary))
    errors.raise_on_all_ranks()
    stages = {name: engine.zero_optimization_stage() for name, engine in engines.items()}
    manifest = {"step": step, "world_size": collectives.world_size(), "zero_stages": stages, **(metadata or {})}
    if run_in_background is not None:
        if collectives.is_main():
            run_in_background(lambda: _complete(folder, temporary, manifest | {"files": digests(temporary)}, keep))
        return folder
    manifest["files"] = _digests_by_all_ranks(temporary, errors)
    if collectives.is_main():
        errors.attempt(lambda: _complete(folder, temporary, manifest, keep))
    errors.raise_on_all_ranks()
    return folder


def _create_temporary(temporary: Path, engines: Engines) -> None:
    """Remove the temporary folders of killed saves, create this one, and check that the disk has room."""
    for abandoned in temporary.parent.glob(".step-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    temporary.mkdir(parents=True)
    check_space(temporary, expected_bytes(engines.values()))


def _write_engines(engines: Engines, temporary: Path, errors: WriteErrors) -> None:
    """Write DeepSpeed's checkpoint of each engine; a collective."""
    with watchdog.watch_folder(temporary) if collectives.is_main() else nullcontext():
        for name, engine in engines.items():
            with errors.recorded_from(engine):
                engine.save_checkpoint(str(temporary), tag=name, save_latest=False)
            failpoint.reached(f"save_{name}")


def _digests_by_all_ranks(temporary: Path, errors: WriteErrors) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of every file; each rank reads its share of the files. A collective."""
    files: dict[str, tuple[int, str]] = {}
    errors.attempt(lambda: files.update(digests(temporary, share=(collectives.rank(), collectives.world_size()))))
    errors.raise_on_all_ranks()
    entries = [entry for rank_files in collectives.all_gather_objects(files) for entry in rank_files.items()]
    return dict(sorted(entries))


def _complete(folder: Path, temporary: Path, manifest: dict[str, Any], keep: int) -> None:
    """Write the manifest of a folder whose files are on disk, rename it, then remove older checkpoints."""
    failpoint.reached("save_digested")
    write_atomically(temporary / "manifest.json", json.dumps(manifest, indent=1))
    failpoint.reached("save_manifest")
    replaced = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        folder.rename(replaced)
        failpoint.reached("save_replacing")  # if killed here, the next start restores the old folder
    temporary.rename(folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    failpoint.reached("save_renamed")
    write_atomically(folder.parent / "latest", folder.name)
    failpoint.reached("save_pointed")
    folders = step_folders(folder.parent)
    newest = folders.index(folder)
    for other in folders[: max(newest + 1 - keep, 0)] + folders[newest + 1 :]:
        # Rename first: a kill during rmtree must not leave half a checkpoint under a valid name.
        removed = other.with_name(f".{other.name}.gone")
        shutil.rmtree(removed, ignore_errors=True)
        other.rename(removed)
        failpoint.reached("save_pruning")
        shutil.rmtree(removed)
