"""Save and load resumable checkpoints: written to a temporary folder, checksummed, renamed, then named in `latest`.

output_dir/checkpoints/step-00000120/
    manifest.json          step, world size, arguments, versions, and size + SHA-256 of every other file
    state.json             state of the training loop: its counters and positions in the data
    random_rank0.…         random states of each rank
    actor/, critic/, …     DeepSpeed's own checkpoint of each engine
output_dir/checkpoints/latest    the name of the newest complete checkpoint
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors import SafetensorError

from dschat.arguments import flag_values
from dschat.arguments.flags import resume_policies
from dschat.arguments.secrets import redacted_values
from dschat.arguments.strict_json import read_json_object
from dschat.checkpoints.earlier_runs import bring_back, newest_before, set_aside, step_folders
from dschat.checkpoints.leftovers import remove_leftovers
from dschat.checkpoints.manifest import read_manifest, unlisted
from dschat.checkpoints.optimizer_settings import settings_kept
from dschat.checkpoints.random_states import load_random_states, save_random_states
from dschat.checkpoints.resize import converted
from dschat.checkpoints.restricted_pickle import is_pickle, pickle_problems, restricted_unpickling
from dschat.checkpoints.verified_folder import digests, file_problems, sync, sync_all, write_atomically
from dschat.distributed import collectives, failpoint, launch, watchdog
from dschat.distributed.terminal import printable

Engines = Mapping[str, deepspeed.DeepSpeedEngine]
# Raised by writes to a full or detached disk; torch's own writer raises RuntimeError.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)


def save(
    output_dir: str | Path,
    step: int,
    *,
    update: int = 0,
    engines: Engines,
    state: dict[str, Any],
    keep: int,
    also: Callable[[Path], None] | None = None,
    about: Mapping[str, Any] | None = None,
    later: Callable[[Callable[[], None]], None] | None = None,
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
        also: called on every rank with the temporary folder, to add further files (an EMA, say).
        about: metadata for the manifest, read by people and by `changed_arguments`.
        later: called on the main rank with the rest of the work (checksums, renaming, removal of older checkpoints), to
            run it in the background: all files are on disk by then and no longer written. None: run it here.

    Returns: the folder; complete, or completed later by the background work.
    Raises: OSError on every rank if any rank cannot write; the temporary folder is removed.
    """
    name = f"step-{step:08d}" + (f"-update-{update:04d}" if update else "")
    folder = Path(output_dir, "checkpoints", name)
    temporary = folder.with_name(f".{folder.name}.tmp")
    problems: list[str] = []

    def attempt(write: Callable[[], Any]) -> None:
        if not problems:
            try:
                write()
            except WRITE_ERRORS as error:
                problems.append(f"rank {collectives.rank()}: {error}")

    def make_room() -> None:
        for left in folder.parent.glob(".step-*"):  # left by killed saves
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)
        check_space(temporary, expected_bytes(engines))

    if collectives.is_main():
        attempt(make_room)
    _agree(problems, temporary)
    failpoint.reached("save_begin")
    with watchdog.following(temporary) if collectives.is_main() else nullcontext():
        for name, engine in engines.items():
            with _catching_writes(engine, problems):
                engine.save_checkpoint(str(temporary), tag=name, save_latest=False)
            failpoint.reached(f"save_{name}")
    if also is not None:
        _agree(problems, temporary)  # it may contain collectives: no rank may skip it alone
        attempt(lambda: also(temporary))
    attempt(lambda: save_random_states(temporary))
    failpoint.reached("save_written")
    _agree(problems, temporary)
    if collectives.is_main():
        attempt(lambda: write_atomically(temporary / "state.json", json.dumps(state, indent=1)))
    _agree(problems, temporary)
    if collectives.is_main_of_node():  # dirty pages are on the node that wrote the file
        attempt(lambda: sync_all(temporary))
    _agree(problems, temporary)
    stages = {name: engine.zero_optimization_stage() for name, engine in engines.items()}
    head = {"step": step, "world_size": collectives.world_size(), "zero_stages": stages, **(about or {})}
    if later is not None:
        if collectives.is_main():
            later(lambda: _complete(folder, temporary, head | {"files": digests(temporary, share=(0, 1))}, keep))
        return folder
    files: dict[str, tuple[int, str]] = {}
    attempt(lambda: files.update(digests(temporary, share=(collectives.rank(), collectives.world_size()))))
    _agree(problems, temporary)
    files = {name: entry for part in collectives.all_gather_objects(files) for name, entry in part.items()}
    if collectives.is_main():
        manifest = head | {"files": dict(sorted(files.items()))}
        attempt(lambda: _complete(folder, temporary, manifest, keep))
    _agree(problems, temporary)
    return folder


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
    folders = _step_folders(folder.parent.parent)
    newest = folders.index(folder)
    for other in folders[: max(newest + 1 - keep, 0)] + folders[newest + 1 :]:
        # Rename first: a kill during rmtree must not leave half a checkpoint under a valid name.
        gone = other.with_name(f".{other.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        other.rename(gone)
        failpoint.reached("save_pruning")
        shutil.rmtree(gone)


def _agree(problems: list[str], temporary: Path) -> None:
    """If any rank has a problem, remove the temporary folder and raise OSError on every rank."""
    found = collectives.all_gather_lists(problems)
    if found:
        if collectives.is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        collectives.barrier()
        raise OSError(f"the checkpoint cannot be written: {'; '.join(found[:3])}")


@contextmanager
def _catching_writes(engine: deepspeed.DeepSpeedEngine, problems: list[str]) -> Iterator[None]:
    """Collect write errors of DeepSpeed in `problems`: raised on one rank, they would make the others hang."""
    writer = engine.checkpoint_engine
    write = writer.save

    def caught(state_dict: Any, path: str) -> None:
        if problems:
            return
        try:
            failpoint.reached("save_writing")
            _numbers_for_enums(state_dict)
            write(state_dict, path)
            watchdog.progress()
            failpoint.reached("save_one_written")
        except WRITE_ERRORS as error:
            problems.append(f"rank {collectives.rank()}: {Path(path).name}: {str(error).splitlines()[0]}")

    writer.save = caught
    try:
        yield
    finally:
        del writer.save


def _numbers_for_enums(state: Any) -> None:
    """Replace enums in a state dict by their values: some Python versions pickle them by way of `getattr`."""
    for name, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, Enum):
            state[name] = value.value
        elif isinstance(value, dict):
            _numbers_for_enums(value)


def expected_bytes(engines: Engines) -> int:
    """Approximate size of a checkpoint over all ranks: weights; if trained, Adam's moments, float32 weights."""
    total = 0
    for engine in engines.values():
        for parameter in engine.module.parameters():
            count = getattr(parameter, "ds_numel", parameter.numel())
            copy = 4 if parameter.dtype != torch.float32 or engine.zero_optimization_stage() else 0
            total += count * (parameter.element_size() + (8 + copy if parameter.requires_grad else 0))
    return total


def check_space(folder: Path, needed: int) -> None:
    """Raise OSError if the folder's disk has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"a checkpoint takes about {needed / 1e9:.2f} GB, the disk of {folder.parent} has {free / 1e9:.2f} GB "
            "left: lower --keep_checkpoints, or make room"
        )


def find(output_dir: str | Path, resume: str) -> Path | None:
    """Resolve `--resume`: "never" → None; "auto" → the newest valid checkpoint, or None; else the path.

    A collective: the main rank decides for all. It removes files that killed processes left half written. If the run
    starts from scratch, checkpoints and logs of an earlier run are moved aside: they are kept, and a later "auto" does
    not load them.

    Raises: ValueError if the named checkpoint, or every one that "auto" considered, fails verification; or if files of
        the folder cannot be moved.
    """
    watchdog.phase("checkpoint verification")
    found, problem = None, None
    if collectives.is_main():
        try:
            remove_leftovers(output_dir)
            found = None if resume == "never" else _find(output_dir, resume)
            if found is None:
                _begin_anew(output_dir)
            else:
                bring_back(output_dir, found)
        except ValueError as error:
            problem = str(error)
        except OSError as error:
            problem = f"--output_dir {output_dir}: what an earlier run left there cannot be moved ({error})"
    found, problem = collectives.all_gather_objects((found, problem))[0]
    if problem:
        raise ValueError(problem)
    return found


def _begin_anew(output_dir: str | Path) -> None:
    """Move the files of an earlier run aside, and print where its checkpoints are."""
    aside, saved = set_aside(output_dir), newest_before(output_dir)
    parts = [f"checkpoints, metrics and samples of the run before are in {aside}"] if aside is not None else []
    parts += [f"the newest checkpoint of an earlier run is used by --resume {saved}"] if saved is not None else []
    if parts:
        print(f"this run starts anew, from step 0: {'; '.join(parts)}", flush=True)


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
        print(printable(f"warning: {folder} is damaged and passed over ({'; '.join(problems[:3])})"), flush=True)
    if found:
        raise ValueError(
            f"--resume auto: none of the {len(found)} checkpoints in {output_dir} verifies; --resume never starts anew"
        )
    return None


def newest(output_dir: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, without verification; None if there is none."""
    folders = _step_folders(output_dir)
    return folders[-1] if folders else None


def verify(folder: str | Path) -> list[str]:
    """Validate a checkpoint: missing, changed or unlisted files, links, code in pickles. Returns a line per problem.

    A checkpoint written within an iteration holds each rank's rollouts, so the world size must be the same.
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    files, world_size = manifest["files"], manifest["world_size"]
    problems = unlisted(folder, files)
    if world_size != collectives.world_size() and "-update-" in folder.name:
        problems.append(
            f"it was written by {world_size} processes in the middle of an iteration, and this run has "
            f"{collectives.world_size()}: start as many"
        )
    damaged = file_problems(folder, files)
    if not damaged:
        for name in files:
            problems += pickle_problems(folder / name) if is_pickle(folder / name) else []
    problems += damaged
    return problems


def load(folder: Path, *, engines: Engines, same: dict[str, Any]) -> dict[str, Any]:
    """Restore engines and random states from a checkpoint; a collective. Returns the saved state.

    Learning rates, weight decay, betas and gradient clipping stay those that the engines were built with.

    Args:
        same: entries that the saved state must have with equal values; entries that are None are not compared.

    Raises: ValueError if they differ, if the ZeRO stages do not match, or if the checkpoint lacks an engine.
    """
    try:
        state = read_json_object(folder / "state.json", constants=True)
    except ValueError as error:
        raise ValueError(f"{error}: resume from another checkpoint") from error
    changed = [
        f"{name} was {state.get(name)} and is {now}"
        for name, now in same.items()
        if now is not None and state.get(name, now) != now  # older states have fewer entries
    ]
    if changed:
        raise ValueError(
            f"{folder} belongs to another run, which cannot be gone on with: {'; '.join(changed)}. Resume with the "
            "settings and data of its run.json, or start anew with --resume never"
        )
    manifest = read_json_object(folder / "manifest.json", constants=True)
    resized = manifest["world_size"] != collectives.world_size()
    stages = {name: engine.zero_optimization_stage() for name, engine in engines.items()}
    for name, then in manifest.get("zero_stages", {}).items():
        now = stages.get(name, then)
        if then != now and {then, now} != {1, 2}:
            raise ValueError(
                f"{folder} holds the {name} of ZeRO stage {then}, and this run has stage {now}: resume with "
                f"stage {then} (1 and 2 keep the same things, the others do not)"
            )
    watchdog.phase("resume")
    source_of = converted(folder, engines) if resized else nullcontext(folder)
    with settings_kept(engines), restricted_unpickling(f"{folder} is refused: "), source_of as source:
        for name, engine in engines.items():
            watchdog.progress()
            path, _ = engine.load_checkpoint(str(source), tag=name)
            if path is None:
                raise ValueError(f"{folder} holds no checkpoint of the {name}: was it written by another step?")
    if resized:  # data and its order are the same, but random states are per rank
        launch.seed_all(state["seed"] + 1000 * manifest["step"] + collectives.rank())
    else:
        load_random_states(folder)
    return state


def changed_arguments(folder: Path, settings: Any, *, anyway: bool) -> list[str]:
    """Flags that have changed since a checkpoint was written, a line each.

    Raises:
        ValueError: one of them must not change (its flag() has on_resume="refuse"), and anyway is False.
    """
    try:
        manifest = read_json_object(folder / "manifest.json", constants=True)
    except (OSError, ValueError):
        return []
    # Compared with secrets redacted: old manifests contain keys, and a new key is no change.
    then, now = redacted_values(manifest.get("arguments", {})), redacted_values(flag_values(settings))
    policies = resume_policies(settings)
    changed = {
        name: f"--{name} was {then[name]}, is {now[name]}" for name in now if then.get(name, now[name]) != now[name]
    }
    foreign = [line for name, line in changed.items() if policies.get(name) == "refuse"]
    if foreign and not anyway:
        raise ValueError(
            f"{folder} belongs to another run: {'; '.join(foreign)}. Go on with the flags of its manifest.json, start "
            "anew with --resume never, or say --resume_anyway"
        )
    return [line for name, line in changed.items() if policies.get(name) != "ignore"]


def _step_folders(output_dir: str | Path) -> list[Path]:
    return step_folders(Path(output_dir, "checkpoints"))
