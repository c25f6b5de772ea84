"""Load a verified checkpoint into the engines of a run, and list the flags that have changed since it was written."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dschat.arguments import flag_values
from dschat.arguments.flags import resume_policies
from dschat.arguments.secrets import redacted_values
from dschat.arguments.strict_json import read_json_object
from dschat.checkpoints.optimizer_settings import keep_optimizer_settings
from dschat.checkpoints.random_states import load_random_states
from dschat.checkpoints.resize import converted_checkpoint
from dschat.checkpoints.restricted_pickle import restricted_unpickling
from dschat.checkpoints.saving import Engines
from dschat.distributed import collectives, launch, watchdog


def load_checkpoint(folder: Path, *, engines: Engines, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Restore engines and random states from a checkpoint; a collective. Returns the saved state.

    Learning rates, weight decay, betas and gradient clipping stay those that the engines were built with.

    Args:
        fingerprint: entries that the saved state must have with equal values; entries that are None are not compared.

    Raises: ValueError if they differ, if the ZeRO stages do not match, or if the checkpoint lacks an engine.
    """
    try:
        state = read_json_object(folder / "state.json", constants=True)
    except ValueError as error:
        raise ValueError(f"{error}: resume from another checkpoint") from error
    _check_fingerprint(folder, state, fingerprint)
    manifest = read_json_object(folder / "manifest.json", constants=True)
    _check_zero_stages(folder, manifest.get("zero_stages", {}), engines)
    resized = manifest["world_size"] != collectives.world_size()
    watchdog.phase("resume")
    readable = converted_checkpoint(folder, engines) if resized else nullcontext(folder)
    error_prefix = f"{folder} is refused: "
    with keep_optimizer_settings(engines), restricted_unpickling(error_prefix), readable as source:
        for name, engine in engines.items():
            watchdog.progress()
            path, _ = engine.load_checkpoint(str(source), tag=name)
            if path is None:
                raise ValueError(f"{folder} contains no checkpoint of the {name}: was it written by another step?")
    if resized:  # data and its order are the same, but random states are per rank
        launch.seed_all(state["seed"] + 1000 * manifest["step"] + collectives.rank())
    else:
        load_random_states(folder)
    return state


def _check_fingerprint(folder: Path, state: dict[str, Any], fingerprint: dict[str, Any]) -> None:
    changed = [
        f"{name} was {state.get(name)} and is {now}"
        for name, now in fingerprint.items()
        if now is not None and state.get(name, now) != now  # older states have fewer entries
    ]
    if changed:
        raise ValueError(
            f"{folder} belongs to another run and cannot be resumed by this one: {'; '.join(changed)}. Resume with the "
            "settings and data of its run.json, or start from scratch with --resume never"
        )


def _check_zero_stages(folder: Path, saved: dict[str, int], engines: Engines) -> None:
    stages = {name: engine.zero_optimization_stage() for name, engine in engines.items()}
    for name, then in saved.items():
        now = stages.get(name, then)
        if then != now and {then, now} != {1, 2}:
            # One rank runs stage 2 as stage 1, see deepspeed_config.
            saved_stage, own_stage = ("1 or 2" if stage in (1, 2) else stage for stage in (then, now))
            raise ValueError(
                f"{folder} contains the {name} of ZeRO stage {saved_stage}, but this run has stage {own_stage}: resume "
                f"with stage {saved_stage}"
            )


def changed_arguments(folder: Path, settings: Any, *, resume_anyway: bool) -> list[str]:
    """Flags that have changed since a checkpoint was written, a line each.

    Raises:
        ValueError: one of them must not change (its flag() has on_resume="refuse"), and resume_anyway is False.
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
    refused = [line for name, line in changed.items() if policies.get(name) == "refuse"]
    if refused and not resume_anyway:
        raise ValueError(
            f"{folder} belongs to another run: {'; '.join(refused)}. Resume with the flags of its manifest.json, start "
            "from scratch with --resume never, or add --resume_anyway"
        )
    return [line for name, line in changed.items() if policies.get(name) != "ignore"]
