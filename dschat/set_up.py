"""From argument groups to what a step works with: checked models, data splits, engines, the log."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from dschat import launch
from dschat.arguments import (
    DataArguments,
    DeviceArguments,
    LoraArguments,
    ModelArguments,
    OptimizerArguments,
    PPOArguments,
    RLHFModelArguments,
    RolloutArguments,
    RunArguments,
)
from dschat.data.datasets import DataOptions, DataSplits, build_dataset, data_problems
from dschat.deepspeed_config import training_config
from dschat.engines import trainable_engine
from dschat.metrics import RunLog
from dschat.models.causal_lm import load_tokenizer
from dschat.models.lora import add_lora, optimizer_groups


def model_problems(flag: str, path: str | None, *, tokens: int, lengths: str) -> list[str]:
    """What makes a model unusable for sequences of so many tokens, found before anything is loaded.

    Args:
        flag: the flag that named the model, for the message.
        tokens: longest sequence of the run.
        lengths: the flags and values that add up to it, for the message.
    """
    if not path:
        return []  # the group that owns the flag says so
    folder = Path(path)
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not folder.is_dir():
        return [f"{flag} {path}: there is no such folder"]
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        return [f"{flag} {path}: no model configuration found ({str(error).splitlines()[0]})"]
    problems = []
    if folder.is_dir() and not list(folder.glob("tokenizer*")) + list(folder.glob("vocab*")):
        problems.append(f"{flag} {path}: the folder has no tokenizer; save one into it with tokenizer.save_pretrained")
    positions = vars(config).get("max_position_embeddings") or vars(config).get("n_positions")
    if positions and tokens > positions:
        problems.append(
            f"{lengths} = {tokens} tokens, but {path} has {positions} positions: "
            "lower the lengths, or choose a model with more positions"
        )
    return problems


def one_model_problems(kind: str, model: ModelArguments, data: DataArguments, run: RunArguments) -> list[str]:
    """What cannot work in steps 1 and 2: the model against the lengths, the data files."""
    lengths = f"--max_seq_len {model.max_seq_len}"
    problems = model_problems(
        "--model_name_or_path", model.model_name_or_path, tokens=model.max_seq_len, lengths=lengths
    )
    return problems + data_problems(kind, data_options(data, run, max_tokens=model.max_seq_len))


def rlhf_problems(
    models: RLHFModelArguments, rollouts: RolloutArguments, ppo: PPOArguments, data: DataArguments,
    optimizer: OptimizerArguments, _lora: LoraArguments, _devices: DeviceArguments, run: RunArguments,
) -> list[str]:  # fmt: skip
    """What cannot work among the settings of step 3: models against lengths and each other, batches against updates."""
    tokens = rollouts.max_prompt_seq_len + rollouts.max_answer_seq_len
    lengths = f"--max_prompt_seq_len {rollouts.max_prompt_seq_len} + --max_answer_seq_len {rollouts.max_answer_seq_len}"
    reward_path = models.reward_model_name_or_path or models.critic_model_name_or_path
    critic_path = models.critic_model_name_or_path or models.reward_model_name_or_path
    problems = model_problems(
        "--actor_model_name_or_path", models.actor_model_name_or_path, tokens=tokens, lengths=lengths
    )
    problems += model_problems("--critic_model_name_or_path", critic_path, tokens=tokens, lengths=lengths)
    if reward_path != critic_path:
        problems += model_problems("--reward_model_name_or_path", reward_path, tokens=2, lengths=lengths)
    if not problems and models.actor_model_name_or_path and critic_path:
        actor = load_tokenizer(models.actor_model_name_or_path, add_eot_token=data.add_eot_token)
        if load_tokenizer(critic_path).get_vocab() != actor.get_vocab():
            problems.append(
                f"--critic_model_name_or_path {critic_path}: reads the actor's token ids, but has another vocabulary: "
                "name a critic with the actor's tokenizer (the actor's own folder will do: it gets a new head)"
            )
    problems += data_problems("prompt", data_options(data, run, max_tokens=rollouts.max_prompt_seq_len))
    rows = rollouts.per_device_generation_batch_size * rollouts.generation_batches
    minibatch = ppo.per_device_training_batch_size * optimizer.gradient_accumulation_steps
    if rows % minibatch:
        problems.append(
            f"--per_device_generation_batch_size {rollouts.per_device_generation_batch_size} x --generation_batches "
            f"{rollouts.generation_batches} = {rows} sequences do not divide into minibatches of "
            f"--per_device_training_batch_size {ppo.per_device_training_batch_size} x --gradient_accumulation_steps "
            f"{optimizer.gradient_accumulation_steps} = {minibatch}: make the first a multiple of the second"
        )
    return problems


def data_options(
    data: DataArguments, run: RunArguments, *, max_tokens: int, train_on_prompt: bool = False
) -> DataOptions:
    """The data flags of a step, and its longest sequence, as dschat.data takes them."""
    return DataOptions(
        data_path=data.data_path,
        output_path=data.data_output_path or str(Path(run.output_dir, "data")),
        max_tokens=max_tokens,
        data_split=data.data_split,
        seed=run.seed,
        eval_data_path=data.eval_data_path,
        eval_fraction=data.eval_fraction,
        overlong=data.overlong,
        max_bad_rows=data.max_bad_rows,
        train_on_prompt=train_on_prompt,
    )


def load_splits(kind: str, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> DataSplits:
    """The train and evaluation rows of a step, prepared once per node, with a summary on the console."""
    with launch.local_main_first():
        splits = build_dataset(kind, tokenizer, options)
    if launch.is_main():
        print(splits.report.summary(), flush=True)
    return splits


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
    """Configuration, model, adapters, optimizer and schedule of one trained model.

    Args:
        load: DeepSpeed configuration → the network; under ZeRO-3 it loads partitioned.
    """
    config = training_config(
        dtype=devices.dtype,
        zero_stage=zero_stage,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=optimizer.gradient_accumulation_steps,
        world_size=launch.world_size(),
        max_grad_norm=optimizer.max_grad_norm,
        offload=devices.offload,
        overrides=devices.deepspeed_config,
    )
    network = load(config)
    if lora_dim:
        add_lora(
            network.model, dim=lora_dim, module_name=lora.lora_module_name, only_optimize_lora=lora.only_optimize_lora
        )
    groups = optimizer_groups(
        network, learning_rate=learning_rate, lora_learning_rate=lora.lora_learning_rate, weight_decay=weight_decay
    )
    return trainable_engine(
        network,
        config=config,
        parameter_groups=groups,
        adam_betas=(optimizer.adam_beta1, optimizer.adam_beta2),
        lr_scheduler_type=optimizer.lr_scheduler_type,
        num_warmup_steps=optimizer.num_warmup_steps,
        num_training_steps=total_steps,
    )


def open_log(name: str, groups: tuple, run: RunArguments, *, total_steps: int, finished_steps: int) -> RunLog:
    tensorboard = run.tensorboard_path or str(Path(run.output_dir, "tensorboard"))
    return RunLog(
        run.output_dir,
        name=name,
        groups=groups,
        total_steps=total_steps,
        tensorboard=tensorboard if run.enable_tensorboard else None,
        finished_steps=finished_steps,
    )
