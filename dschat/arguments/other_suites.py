"""Flags of other suites: DeepSpeed-Chat's are accepted, and those of TRL, OpenRLHF and verl are answered with ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Spelling(NamedTuple):
    """A flag of DeepSpeed-Chat that this suite does not have.

    Attributes:
        words: number of values that follow it.
        ours: flags with the same effect; "{}" stands for its value. Empty: it has no effect here.
        reason: why it has none.
    """

    words: int
    ours: tuple[str, ...] = ()
    reason: str = ""


NO_TENSOR_PARALLELISM = "the hybrid engine decodes with whole weights on each device"
DEEPSPEED_CHAT = {
    "deepspeed": Spelling(0, reason="DeepSpeed is always used"),
    "num_padding_at_beginning": Spelling(1, reason="padding is masked wherever it is"),
    "compute_fp32_loss": Spelling(0, reason="losses are always computed in float32"),
    "print_loss": Spelling(0, reason="losses are always logged"),
    "inference_tp_size": Spelling(1, reason=NO_TENSOR_PARALLELISM),
    "tp_gather_partition_size": Spelling(1, reason=NO_TENSOR_PARALLELISM),
    "unpin_actor_parameters": Spelling(0, reason="weights are held during rollouts only"),
    "release_inference_cache": Spelling(0, reason="it is released after every rollout, except with "
                                        "--pin_generation_buffers"),
    "enable_mixed_precision_lora": Spelling(0, reason="adapters are trained in --dtype"),
    "align_overflow": Spelling(0, reason="updates with an overflow are always skipped on all ranks"),
    "enable_test_mode": Spelling(0, reason="--max_steps N ends a run after N iterations"),
    "test_stop_step": Spelling(1, reason="--max_steps N ends a run after N iterations"),
    "unsupervised_dataset_config_name": Spelling(1, reason="a configuration is part of the name: OWNER/NAME:CONFIG"),
    "disable_dropout": Spelling(0, ("--dropout", "0")),
    "disable_actor_dropout": Spelling(0, ("--actor_dropout", "0")),
    "disable_critic_dropout": Spelling(0, ("--critic_dropout", "0")),
    "actor_gradient_checkpointing": Spelling(0, ("--gradient_checkpointing",)),
    "critic_gradient_checkpointing": Spelling(0, ("--gradient_checkpointing",)),
    "actor_lora_module_name": Spelling(1, ("--lora_module_name", "{}")),
    "critic_lora_module_name": Spelling(1, ("--lora_module_name", "{}")),
    "actor_lora_learning_rate": Spelling(1, ("--lora_learning_rate", "{}")),
    "critic_lora_learning_rate": Spelling(1, ("--lora_learning_rate", "{}")),
    # Its first version.
    "per_device_train_batch_size": Spelling(1, ("--per_device_generation_batch_size", "{}")),
    "per_device_mini_train_batch_size": Spelling(1, ("--per_device_training_batch_size", "{}")),
    "generation_batch_numbers": Spelling(1, ("--generation_batches", "{}")),
}  # fmt: skip

# Flags of TRL, OpenRLHF and verl → ours, of which the first that the step has is named.
HABITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "learning_rate", "actor_lr"), ("learning_rate", "actor_learning_rate")),
    **dict.fromkeys(("critic_lr", "value_lr"), ("critic_learning_rate",)),
    **dict.fromkeys(
        ("model", "model_name", "model_path", "pretrain", "model_name_or_path"),
        ("model_name_or_path", "actor_model_name_or_path"),
    ),
    **dict.fromkeys(("reward_model", "reward_pretrain", "reward_model_path"), ("reward_model_name_or_path",)),
    **dict.fromkeys(("reward_funcs", "remote_rm_url", "custom_reward_function"), ("reward",)),
    **dict.fromkeys(("ref_model", "ref_pretrain"), ("ref_model_name_or_path",)),
    **dict.fromkeys(("dataset", "dataset_name", "dataset_path", "prompt_data", "train_files"), ("data_path",)),
    **dict.fromkeys(("eval_dataset", "val_files", "test_files"), ("eval_data_path",)),
    **dict.fromkeys(("num_generations", "n_samples_per_prompt", "num_return_sequences"), ("num_samples_per_prompt",)),
    **dict.fromkeys(("max_completion_length", "generate_max_len", "max_new_tokens", "max_response_length"),
                    ("max_answer_seq_len", "max_seq_len")),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len"), ("max_prompt_seq_len", "max_seq_len")),
    **dict.fromkeys(("max_length", "max_len", "max_seq_length"), ("max_seq_len", "max_answer_seq_len")),
    **dict.fromkeys(("beta", "init_kl_coef", "kl_penalty_coef", "kl_loss_coef"), ("beta", "kl_coef")),
    **dict.fromkeys(("batch_size", "train_batch_size", "micro_train_batch_size", "per_device_train_batch_size"),
                    ("per_device_train_batch_size", "per_device_training_batch_size")),
    **dict.fromkeys(("rollout_batch_size", "micro_rollout_batch_size"), ("per_device_generation_batch_size",)),
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs", "total_epochs"), ("num_train_epochs",)),
    **dict.fromkeys(("num_ppo_epochs", "num_iterations"), ("ppo_epochs",)),
    **dict.fromkeys(("cliprange", "eps_clip", "epsilon", "clip_ratio"), ("clip_range",)),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high"), ("clip_range_high",)),
    **dict.fromkeys(("cliprange_value", "value_clip"), ("value_clip_range",)),
    **dict.fromkeys(("lam", "lambd"), ("gae_lambda",)),
    **dict.fromkeys(("advantage_estimator", "adv_estimator"), ("algorithm",)),
    **dict.fromkeys(("loss_type",), ("loss_aggregation", "preference_loss")),
    **dict.fromkeys(("save_steps",), ("save_interval",)),
    **dict.fromkeys(("eval_steps",), ("eval_interval",)),
    **dict.fromkeys(("warmup_steps", "lr_warmup_ratio", "warmup_ratio"), ("num_warmup_steps",)),
    **dict.fromkeys(("lr_scheduler",), ("lr_scheduler_type",)),
    **dict.fromkeys(("max_norm", "grad_clip", "clip_grad"), ("max_grad_norm",)),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "param_dtype"), ("dtype",)),
    **dict.fromkeys(("lora_r", "lora_rank", "use_peft"), ("lora_dim", "actor_lora_dim")),
    **dict.fromkeys(("resume_from_checkpoint", "load_checkpoint"), ("resume",)),
    **dict.fromkeys(("save_path", "ckpt_path"), ("output_dir",)),
    **dict.fromkeys(("packing_samples",), ("remove_padding", "packing")),
    **dict.fromkeys(("use_vllm", "vllm_mode"), ("rollout_engine",)),
    **dict.fromkeys(("use_liger_kernel", "use_liger"), ("kernels",)),
    **dict.fromkeys(("use_wandb", "use_tensorboard", "use_mlflow", "use_swanlab", "logger"), ("report_to",)),
    **dict.fromkeys(("log_interval", "logging_interval", "print_every"), ("logging_steps",)),
    **dict.fromkeys(("experiment_name", "wandb_run_name"), ("run_name",)),
}  # fmt: skip


def ours_for(name: str, flags: Collection[str]) -> str | None:
    """The flag of this step that a flag of another suite corresponds to, or None."""
    return next((candidate for candidate in HABITS.get(name, ()) if candidate in flags and candidate != name), None)


class Translated(NamedTuple):
    """Command line after translation, warnings about flags without effect, and mistakes."""

    arguments: list[str]
    warnings: list[str]
    mistakes: list[str]


def translate(arguments: Sequence[str], flags: Mapping[str, object]) -> Translated:
    """Replace DeepSpeed-Chat's flags that this step does not have by those that it has.

    Args:
        flags: of this step, by name.
    """
    result, warnings, mistakes = [], [], []
    given: dict[str, tuple[str, tuple[str, ...]]] = {}  # our flag → theirs and the words it became
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, separator, value = word[2:].partition("=")
        spelling = DEEPSPEED_CHAT.get(name) if word.startswith("--") and name not in flags else None
        if spelling is None or (spelling.ours and spelling.ours[0][2:] not in flags):
            result.append(word)
            continue
        if spelling.words and not separator:
            if not words or words[0].startswith("--"):
                mistakes.append(f"--{name}: expects a value")
                continue
            value = words.pop(0)
        if not spelling.ours:
            warnings.append(f"--{name} has no effect here: {spelling.reason}")
            continue
        ours = tuple(part.replace("{}", value) for part in spelling.ours)
        other, earlier = given.setdefault(ours[0], (name, ours))
        if earlier != ours:
            mistakes.append(f"--{other} and --{name} differ, but both are {ours[0]} here: give them one value")
        elif other == name:
            result += ours
    return Translated(result, warnings, mistakes)
