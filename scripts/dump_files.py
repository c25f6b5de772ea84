"""Read the files that step 3 writes with --dump_step; mistakes are ValueErrors that name the file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dschat.arguments import PPOArguments
from dschat.arguments.flags import out_of_bounds
from dschat.arguments.strict_json import kind_of, read_json_object
from dschat.rlhf.experience import Experience

SETTINGS = {"processes": int, "temperature": (int, float), "max_answer_seq_len": int, "kl_coef": (int, float),
            "ppo": dict}  # fmt: skip


@dataclass(frozen=True)
class Dump:
    """The files of --dump_step, except the models.

    Attributes:
        ppo, temperature, max_answer_seq_len, kl_coef: flags of the update.
        metrics: of the update, by name; None: not finite.
        experience: the first minibatch of each rank.
        recorded: tensors that each rank's losses computed.
    """

    ppo: PPOArguments
    temperature: float
    max_answer_seq_len: int
    kl_coef: float
    metrics: dict[str, float | None]
    experience: list[Experience]
    recorded: list[dict[str, Tensor]]


def read_dump(folder: Path) -> Dump:
    """Read and validate a dump. Raises ValueError or OSError with the file name."""
    settings = read_settings(folder)
    processes = settings.pop("processes")
    metrics = read_json_object(folder / "metrics.json")
    for name, value in metrics.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"{folder / 'metrics.json'}: {name} is {kind_of(value)}, not a number or null")
    return Dump(
        **settings, metrics=metrics, experience=[read_experience(folder, rank) for rank in range(processes)],
        recorded=[read_tensors(folder / f"update_rank{rank}.safetensors") for rank in range(processes)],
    )  # fmt: skip


def read_settings(folder: Path) -> dict[str, Any]:
    """The flags of settings.json. Raises ValueError with the file name."""
    path = folder / "settings.json"
    if not path.is_file():
        raise ValueError(f"{folder} contains no settings.json: name a folder that --dump_step wrote")
    settings = read_json_object(path)
    invalid = [
        name for name, kind in SETTINGS.items()
        if not isinstance(settings.get(name), kind) or isinstance(settings[name], bool)
    ]  # fmt: skip
    if invalid or settings["processes"] < 1:
        invalid = invalid or ["processes"]
        raise ValueError(f"{path}: {', '.join(invalid)} is missing or invalid: was it written by --dump_step?")
    return {name: settings[name] for name in SETTINGS} | {"ppo": ppo_arguments(settings["ppo"], path)}


def ppo_arguments(flags: dict[str, Any], path: Path) -> PPOArguments:
    """The algorithm's flags, with their types and bounds checked. Raises ValueError with the file name."""
    fields = {field.name: field for field in dataclasses.fields(PPOArguments)}
    types = get_type_hints(PPOArguments)
    if unknown := flags.keys() - fields:
        raise ValueError(
            f"{path}: this version has no flag {', '.join(sorted(unknown))}: replay with the version that dumped it"
        )
    for name, value in flags.items():
        choices = fields[name].metadata.get("choices")
        if not has_type(value, types[name]) or (choices and value not in choices):
            raise ValueError(f"{path}: --{name} {json.dumps(value)[:80]} is not a value of this flag")
    ppo = PPOArguments(**flags)
    if mistakes := out_of_bounds(ppo):
        raise ValueError(f"{path}: {'; '.join(mistakes)}")
    return ppo


def has_type(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type of a flag; an integer is a float too, a bool is not a number."""
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return value in parts
    if get_origin(hint) is list:
        return isinstance(value, list) and all(has_type(item, parts[0]) for item in value)
    if parts:  # X | None
        return any(has_type(value, part) for part in parts)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a file. Raises ValueError with the file name if that fails."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not readable as safetensors ({error})") from error


def read_experience(folder: Path, rank: int) -> Experience:
    """The first minibatch of a rank. Raises ValueError with the file name."""
    path = folder / f"iteration_rank{rank}.safetensors"
    fields = {n.removeprefix("0."): tensor for n, tensor in read_tensors(path).items() if n.startswith("0.")}
    try:
        return Experience(**fields)
    except TypeError as error:
        raise ValueError(f"{path}: its tensors are not those of an Experience ({error})") from error
