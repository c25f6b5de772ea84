"""Validate the settings of a run before anything is loaded: model folders, contradictory flags, overwritten models."""

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from dschat.arguments import DeviceArguments, LoraArguments, OneModelSettings, PreferenceSettings
from dschat.data.datasets import data_problems
from dschat.models.adapter_files import CONFIG_FILE
from dschat.models.causal_lm import load_tokenizer
from dschat.models.custom_code import CustomCodeError, custom_code_refused
from dschat.models.folder_check import (
    causal_problems,
    config_problems,
    generation_problems,
    json_problems,
    one_line,
    shape_problems,
    template_problems,
)
from dschat.models.loading import WEIGHT_FILES
from dschat.models.positions import position_limit
from dschat.models.weight_files import weight_problems
from dschat.runs.output_conflicts import overwritten_models
from dschat.runs.set_up import data_options


def model_problems(
    flag: str, path: str | None, *, tokens: int, lengths: str, add_eot_token: bool = False,
    trust_remote_code: bool = False, causal: bool = False,
) -> list[str]:  # fmt: skip
    """Validate a model for sequences of `tokens` tokens before any weights are loaded; one line per problem.

    Args:
        flag: the flag that names the model, for the message.
        tokens: length of the longest sequence of the run.
        lengths: the flags that sum to `tokens`, for the message.
        add_eot_token: whether the run adds an end token to the model's tokenizer.
        trust_remote_code: whether code that ships with the model may run.
        causal: whether it must be a causal language model.
    """
    if not path:
        return []  # reported by problems() of the flag's group
    folder = Path(path)
    is_path = path.startswith((".", "/", "~")) or path.count("/") > 1 or "/" in path and folder.parent.is_dir()
    if folder.is_file():
        return [f"{flag} {path}: is a file; name the folder with config, weights and tokenizer"]
    if is_path and not folder.is_dir():
        return [f"{flag} {path}: there is no such folder"]
    if (folder / CONFIG_FILE).is_file() and not (folder / "config.json").exists():
        merge = f"python scripts/merge_adapters.py {path} {path.rstrip('/')}-merged"
        return [f"{flag} {path}: has adapters, not a model: merge them into it first, by {merge}"]
    invalid = (json_problems(folder) or config_problems(folder)) if folder.is_dir() else []
    if invalid:
        return [f"{flag} {path}: {problem}" for problem in invalid]
    try:
        with custom_code_refused(path):
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except CustomCodeError as error:
        return [f"{flag}: {error}"]
    except Exception as error:  # transformers' config checks raise many types
        if not folder.is_dir():
            return [
                f"{flag} {path}: there is no such folder, and as a name on the hub it could not be loaded "
                f"({one_line(error)})"
            ]
        return [f"{flag} {path}: no model configuration found ({one_line(error)})"]
    problems = _weight_problems(folder, config, new_head=not causal) if folder.is_dir() else []
    problems += causal_problems(config) if causal else []
    try:
        tokenizer = load_tokenizer(path, add_eot_token=add_eot_token, trust_remote_code=trust_remote_code)
        problems += template_problems(tokenizer)
    except ValueError as error:
        problems.append(str(error))
    lines = [f"{flag} {path}: {problem}" for problem in problems]
    positions, kind = position_limit(config)
    if positions and tokens > positions:
        lines.append(
            f"{lengths} = {tokens} tokens, but {path} has {positions} {kind}: "
            "lower the lengths, or choose a model with more positions"
        )
    return lines


def _weight_problems(folder: Path, config: PretrainedConfig, *, new_head: bool) -> list[str]:
    problems = weight_problems(folder) + shape_problems(folder, config, new_head=new_head) + generation_problems(folder)
    if not any((folder / name).exists() for name in WEIGHT_FILES):
        names = " or ".join(WEIGHT_FILES[::2])
        return [f"the folder has no weights ({names}); save them into it with model.save_pretrained", *problems]
    return problems


def vocabulary_problems(
    flag: str, path: str, *, trained: str, add_eot_token: bool, trust_remote_code: bool = False
) -> list[str]:
    """A line if the reference model's vocabulary differs from the trained model's: its log-probs would be meaningless.

    Args:
        flag, path: the flag that names the reference, and its value.
        trained: folder or name of the trained model, whose tokenizer encodes the data.
        add_eot_token: whether the run adds an end token to both.
    """
    trained_vocabulary, vocabulary = (
        load_tokenizer(name, add_eot_token=add_eot_token, trust_remote_code=trust_remote_code).get_vocab()
        for name in (trained, path)
    )
    differing = sorted({token for token, _ in trained_vocabulary.items() ^ vocabulary.items()})
    if not differing:
        return []
    return [
        f"{flag} {path}: receives token ids of {trained}, but {len(differing)} tokens differ between their "
        f"vocabularies ({', '.join(map(repr, differing[:3]))}{', …' if len(differing) > 3 else ''}), so its log-probs "
        "would be of a different text: name a reference with the same tokenizer, such as the initial model"
    ]


def one_model_problems(kind: str, settings: OneModelSettings) -> list[str]:
    """Validate the settings of steps 1 and 2: contradictory flags, model positions, overwritten models, data files."""
    model, data, run = settings.model, settings.data, settings.run
    problems = model_problems(
        "--model_name_or_path", model.model_name_or_path, tokens=model.max_seq_len,
        lengths=f"--max_seq_len {model.max_seq_len}", add_eot_token=data.add_eot_token,
        trust_remote_code=model.trust_remote_code,
        causal=kind == "sft" or isinstance(settings, PreferenceSettings),
    )  # fmt: skip
    problems += contradictions(
        settings.lora, settings.devices, dims={"lora_dim": model.lora_dim}, stages={"zero_stage": model.zero_stage}
    )
    problems += overwritten_models(run.output_dir, [("--model_name_or_path", model.model_name_or_path)])
    return problems + data_problems(kind, data_options(data, run, max_tokens=model.max_seq_len))


def contradictions(
    lora: LoraArguments, devices: DeviceArguments, *, dims: dict[str, int], stages: dict[str, int]
) -> list[str]:
    """Contradictory flags: --only_optimize_lora without adapters, --offload without ZeRO."""
    problems = []
    if lora.only_optimize_lora and not any(dims.values()):
        names = " or ".join(f"--{name}" for name in dims)
        problems.append(f"--only_optimize_lora, but there are no adapters: set the rank {names}, or remove the flag")
    for name, stage in stages.items():
        if devices.offload and stage == 0:
            problems.append(f"--offload, but --{name} 0 has nothing to offload: use stage 1, 2 or 3, or remove it")
    return problems
