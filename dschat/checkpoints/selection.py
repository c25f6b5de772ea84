"""Select and verify the checkpoint that a run resumes from; a run from scratch sets the files of earlier runs aside."""

from pathlib import Path

from dschat.checkpoints.earlier_runs import move_aside, newest_moved_aside, restore_records, step_folders
from dschat.checkpoints.leftovers import remove_leftovers
from dschat.checkpoints.manifest import read_manifest, unlisted_files
from dschat.checkpoints.restricted_pickle import is_pickle, pickle_problems
from dschat.checkpoints.verified_folder import file_problems
from dschat.distributed import collectives, watchdog
from dschat.distributed.terminal import printable


def find_checkpoint(output_dir: str | Path, resume: str) -> Path | None:
    """Resolve `--resume`: "never" → None; "auto" → the newest valid checkpoint, or None; else the path.

    A collective: the main rank decides for all. It removes files that killed processes left half written. If the run
    starts from scratch, checkpoints and logs of an earlier run are moved aside: they are kept, and a later "auto" does
    not load them.

    Raises: ValueError if the named checkpoint, or every one that "auto" considered, fails verification; or if files of
        the folder cannot be moved.
    """
    watchdog.phase("checkpoint verification")
    checkpoint, problem = None, None
    if collectives.is_main():
        try:
            remove_leftovers(output_dir)
            checkpoint = None if resume == "never" else _resolve(output_dir, resume)
            if checkpoint is None:
                _start_from_scratch(output_dir)
            else:
                restore_records(output_dir, checkpoint)
        except ValueError as error:
            problem = str(error)
        except OSError as error:
            problem = (
                f"--output_dir {output_dir}: the files of an earlier run cannot be moved aside ({error}): make them "
                "movable, or name another folder"
            )
    checkpoint, problem = collectives.broadcast_from_main((checkpoint, problem))
    if problem:
        raise ValueError(problem)
    return checkpoint


def _start_from_scratch(output_dir: str | Path) -> None:
    """Move the files of an earlier run aside, and print where its checkpoints are."""
    aside, saved = move_aside(output_dir), newest_moved_aside(output_dir)
    parts = [f"checkpoints, metrics and samples of the previous run are in {aside}"] if aside is not None else []
    parts += [f"to resume from the newest checkpoint of an earlier run: --resume {saved}"] if saved is not None else []
    if parts:
        print(f"this run starts from scratch, at step 0: {'; '.join(parts)}", flush=True)


def _resolve(output_dir: str | Path, resume: str) -> Path | None:
    """The checkpoint of --resume "auto" or a path; None if "auto" has none."""
    if resume != "auto":
        problems = verify_checkpoint(resume)
        if problems:
            raise ValueError(f"--resume {resume} cannot be used: {'; '.join(problems[:5])}")
        return Path(resume)
    folders = step_folders(Path(output_dir, "checkpoints"))
    for folder in reversed(folders):
        problems = verify_checkpoint(folder)
        if not problems:
            return folder
        print(printable(f"warning: {folder} is damaged and skipped ({'; '.join(problems[:3])})"), flush=True)
    if folders:
        raise ValueError(
            f"--resume auto: none of the {len(folders)} checkpoints in {output_dir} passes verification, and --resume "
            "auto does not start from scratch in this case: name a checkpoint, or use --resume never"
        )
    return None


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, without verification; None if there is none."""
    folders = step_folders(Path(output_dir, "checkpoints"))
    return folders[-1] if folders else None


def verify_checkpoint(folder: str | Path) -> list[str]:
    """Validate a checkpoint: missing, changed or unlisted files, links, code in pickles. Returns a line per problem.

    A checkpoint written within an iteration contains each rank's rollouts, so the world size must be the same.
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    files, world_size = manifest["files"], manifest["world_size"]
    problems = unlisted_files(folder, files)
    if world_size != collectives.world_size() and "-update-" in folder.name:
        problems.append(
            f"it was written by {world_size} processes in the middle of an iteration, and this run has "
            f"{collectives.world_size()}: start the same number"
        )
    damaged = file_problems(folder, files)
    if not damaged:
        for name in files:
            problems += pickle_problems(folder / name) if is_pickle(folder / name) else []
    return problems + damaged
