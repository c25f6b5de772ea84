"""Set up a step from its argument groups: validated settings and models, data splits, output folder, engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from dschat.arguments import (
    DataArguments,
    DeviceArguments,
    LoraArguments,
    OneModelSettings,
    OptimizerArguments,
    PreferenceSettings,
    RunArguments,
)
from dschat.arguments.command_line import raise_together, settings_of_user
from dschat.data.datasets import DataOptions, DataSplits, build_dataset, data_problems
from dschat.distributed import collectives, groups, launch, watchdog
from dschat.distributed.deepspeed_config import training_config
from dschat.distributed.engines import trainable_engine
from dschat.distributed.terminal import printable
from dschat.models.causal_lm import load_tokenizer
from dschat.models.folder_check import (
    causal_problems,
    config_problems,
    generation_problems,
    json_problems,
    one_line,
    shape_problems,
    template_problems,
)
from dschat.models.loading import WEIGHT_FILES, CustomCodeError, custom_code_refused
from dschat.models.lora import add_lora, optimizer_groups
from dschat.models.positions import position_limit
from dschat.models.weight_files import weight_problems
from dschat.runs.output_conflicts import overwritten_models
from dschat.runs.output_folder import check_shared, claim


def model_problems(
    flag: str, path: str | None, *, tokens: int, lengths: str, add_eot_token: bool = False,
    trust_remote_code: bool = False, causal: bool = False,
) -> list[str]:  # fmt: skip
    """Validate a model for sequences of `tokens` tokens before any weights are loaded; one line per problem.

    Args:
        flag: the flag that names the model, for the message.
        tokens: length of the longest sequence of the run.
        lengths: the flags and values that add up to it, for the message.
        add_eot_token: whether the run adds an end token to the model's tokenizer.
        trust_remote_code: whether code that ships with the model may run.
        causal: whether it has to continue text.
    """
    if not path:
        return []  # reported by the argument group of the flag
    folder = Path(path)
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if folder.is_file():
        return [f"{flag} {path}: is a file; name the folder that holds config, weights and tokenizer"]
    if looks_local and not folder.is_dir():
        return [f"{flag} {path}: there is no such folder"]
    broken = (json_problems(folder) or config_problems(folder)) if folder.is_dir() else []
    if broken:
        return [f"{flag} {path}: {problem}" for problem in broken]
    try:
        with custom_code_refused(path):
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except CustomCodeError as error:
        return [f"{flag}: {error}"]
    except Exception as error:  # of transformers' checks of each config: none has a type of its own
        return [f"{flag} {path}: no model configuration found ({one_line(error)})"]
    problems = []
    if folder.is_dir() and not any((folder / name).exists() for name in WEIGHT_FILES):
        names = " or ".join(WEIGHT_FILES[::2])
        problems.append(
            f"{flag} {path}: the folder has no weights ({names}); save them into it with model.save_pretrained"
        )
    found = []
    if folder.is_dir():
        found += weight_problems(folder) + shape_problems(folder, config, new_head=not causal)
        found += generation_problems(folder)
    found += causal_problems(config) if causal else []
    try:
        tokenizer = load_tokenizer(path, add_eot_token=add_eot_token, trust_remote_code=trust_remote_code)
        found += template_problems(tokenizer)
    except ValueError as error:
        found.append(str(error))
    problems += [f"{flag} {path}: {problem}" for problem in found]
    positions, kind = position_limit(config)
    if positions and tokens > positions:
        problems.append(
            f"{lengths} = {tokens} tokens, but {path} has {positions} {kind}: "
            "lower the lengths, or choose a model with more positions"
        )
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
    ours, theirs = (
        load_tokenizer(name, add_eot_token=add_eot_token, trust_remote_code=trust_remote_code).get_vocab()
        for name in (trained, path)
    )
    differing = sorted(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token))
    if not differing:
        return []
    return [
        f"{flag} {path}: reads the token ids of {trained}, but {len(differing)} tokens differ between their "
        f"vocabularies ({', '.join(map(repr, differing[:3]))}{', …' if len(differing) > 3 else ''}), so its log-probs "
        "would be those of other text: name a reference with the same tokenizer, such as the model to start from"
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
        problems.append(f"--only_optimize_lora, but there are no adapters: give {names} a rank, or drop the flag")
    for name, stage in stages.items():
        if devices.offload and stage == 0:
            problems.append(f"--offload, but --{name} 0 has nothing to offload: take stage 1, 2 or 3, or drop the flag")
    return problems


def data_options(
    data: DataArguments, run: RunArguments, *, max_tokens: int, train_on_prompt: bool = False, packing: bool = False,
    phase: int | None = None,
) -> DataOptions:  # fmt: skip
    """Convert the data flags of a step to the options of dschat.data."""
    return DataOptions(
        data_path=data.data_path,
        output_path=data.data_output_path or str(Path(run.output_dir, "data")),
        run_path=run.output_dir,
        max_tokens=max_tokens,
        data_split=data.data_split,
        seed=run.seed,
        eval_data_path=data.eval_data_path,
        eval_fraction=data.eval_fraction,
        overlong=data.overlong,
        max_bad_rows=data.max_bad_rows,
        columns=named_columns(data),
        drop_duplicates=data.drop_duplicates,
        parse_special_tokens=data.parse_special_tokens,
        train_on_prompt=train_on_prompt,
        packing=packing,
        phase=phase,
    )


def named_columns(data: DataArguments) -> dict[str, str]:
    """Field of a record → the column that the user's flags map to it."""
    named = {
        "prompt": data.prompt_column,
        "response": data.response_column,
        "messages": data.messages_column,
        "chosen": data.chosen_column,
        "rejected": data.rejected_column,
        "margin": data.margin_column,
        "text": data.text_column,
        "system": data.system_column,
        "tools": data.tools_column,
    }
    return {field: column for field, column in named.items() if column}


def load_splits(kind: str, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> DataSplits:
    """Load the training and evaluation rows of a step, prepared once per node; print a summary.

    Raises: SettingsError on every rank, if the data cannot be used.
    """
    watchdog.phase("data preparation")
    splits, problem = None, None
    with collectives.main_of_node_first():
        try:
            splits = build_dataset(kind, tokenizer, options, verify=collectives.is_main_of_node())
        except ValueError as error:
            problem = str(error)
    problems = collectives.all_gather_objects(problem)  # all ranks raise together, or the others would hang
    raise_together(sorted({problem for problem in problems if problem}))
    if collectives.is_main():
        print(printable(splits.report.summary()), flush=True)
    return splits


def start(run: RunArguments, devices: DeviceArguments) -> torch.device:
    """Join the process group, create and lock the output folder; return this rank's device. Raises SettingsError."""
    device = launch.join(
        seed=run.seed, collective_timeout=run.collective_timeout, rendezvous_timeout=run.rendezvous_timeout,
        deterministic=devices.deterministic,
    )  # fmt: skip
    with settings_of_user():
        make_output_folder(run.output_dir)
        claim(run.output_dir)
        check_shared(run.output_dir)
    return device


def make_output_folder(output_dir: str) -> None:
    """Create the output folder, once the settings are validated. A collective; raises ValueError if that fails."""
    problem = None
    if collectives.is_main():
        try:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"--output_dir {output_dir}: cannot be made ({error.strerror}); name another folder"
    problem = collectives.all_gather_objects(problem)[0]
    if problem:
        raise ValueError(problem)


def build_trainable(
    load: Callable[[dict[str, Any]], nn.Module],
    *,
    learning_rate: float,
    weight_decay: float,
    zero_stage: int,
    lora_dim: int,
    micro_batch_size: int,
    total_steps: int,
    optimizer: OptimizerArguments,
    lora: LoraArguments,
    devices: DeviceArguments,
) -> deepspeed.DeepSpeedEngine:
    """Build the DeepSpeed engine of one trained model: configuration, network, adapters, optimizer and schedule.

    Args:
        load: builds the network, given the DeepSpeed configuration; under ZeRO-3 the weights are partitioned.
    """
    config = training_config(
        dtype=devices.dtype,
        zero_stage=zero_stage,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=optimizer.gradient_accumulation_steps,
        world_size=groups.data_parallel_size(),
        max_grad_norm=optimizer.max_grad_norm,
        offload=devices.offload,
        overrides=devices.deepspeed_config,
    )
    watchdog.phase("model loading")
    with settings_of_user():
        network = load(config)
        if lora_dim:
            add_lora(
                network.model, dim=lora_dim, module_name=lora.lora_module_name,
                only_optimize_lora=lora.only_optimize_lora,
            )  # fmt: skip
    parameter_groups = optimizer_groups(
        network, learning_rate=learning_rate, lora_learning_rate=lora.lora_learning_rate, weight_decay=weight_decay
    )
    watchdog.phase("engine")
    return trainable_engine(
        network,
        config=config,
        parameter_groups=parameter_groups,
        adam_betas=(optimizer.adam_beta1, optimizer.adam_beta2),
        lr_scheduler_type=optimizer.lr_scheduler_type,
        num_warmup_steps=optimizer.num_warmup_steps,
        num_training_steps=total_steps,
    )
