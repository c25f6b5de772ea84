"""Every flag of the suite, declared once: a group per concern, composed by each step's main.py.

Lengths are in tokens, batch sizes in sequences, intervals in optimizer steps (in iterations for step 3).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from dschat.command_line import flag

ZERO_HELP = "ZeRO stage: 0 replicates, 1 shards optimizer states, 2 gradients too, 3 parameters too"
LORA_FLAGS = ("lora_dim", "actor_lora_dim", "critic_lora_dim")
LORA_HELP = "rank of the adapters; 0: none"
DROPOUT_HELP = "override every dropout of the model"


# Flags that make another run of a checkpoint: its models, its data, its random numbers, its shapes.
IDENTITY = frozenset(
    [
        "seed",
        "data_path",
        "data_split",
        "eval_data_path",
        "eval_fraction",
        "overlong",
        "add_eot_token",
        "dtype",
        "model_name_or_path",
        "lora_dim",
        "actor_model_name_or_path",
        "critic_model_name_or_path",
        "reward_model_name_or_path",
        "actor_lora_dim",
        "critic_lora_dim",
        "only_optimize_lora",
        "lora_module_name",
        "max_seq_len",
        "max_prompt_seq_len",
        "max_answer_seq_len",
        "train_on_prompt",
        "unsupervised_dataset_name",
        "lr_scheduler_type",
        "num_warmup_steps",
        "ppo_epochs",
        "generation_batches",
    ]
)
# Flags that may always change: nobody has to hear of it.
SILENT = frozenset(["resume", "resume_anyway", "local_rank"])


@dataclass
class RunArguments:
    """What a run writes, how often it looks at itself, and where it goes on."""

    _argument_group_name: ClassVar[str] = "run"
    output_dir: str = flag("output/run", "folder for metrics, samples, checkpoints and the exported model")
    seed: int = flag(1234, "seeds data order, initialisation, dropout and sampling")
    num_train_epochs: int = flag(1, "passes over the training data", at_least=1)
    max_steps: int = flag(0, "stop after this many steps; 0: as the epochs say", at_least=0)
    eval_interval: int = flag(0, "evaluate every so many steps; 0: before and after training only", at_least=0)
    eval_iters: int = flag(0, "evaluation batches per device; 0: the whole evaluation set", at_least=0)
    save_interval: int = flag(0, "write a resumable checkpoint every so many steps; 0: none", at_least=0)
    save_minutes: float = flag(0.0, "write one every so many minutes, between two updates; 0: none", at_least=0)
    keep_checkpoints: int = flag(2, "how many checkpoints to keep", at_least=1, needs=["save_interval", "save_minutes"])
    resume: str = flag(
        "never", "auto: go on from the newest checkpoint of OUTPUT_DIR that verifies; its path; or never"
    )
    max_bad_steps: int = flag(
        10, "stop after so many updates in a row that were skipped, as a number was not finite; 0: never", at_least=0
    )
    warn_sigma: float = flag(6.0, "warn of a loss or KL so many standard deviations off; 0: never", at_least=0)
    collective_timeout: float = flag(
        1800.0, "seconds that a rank may be silent, or in one phase, before the run ends with a report", above=0
    )
    resume_anyway: bool = flag(False, "resume although flags have changed that make another run of it")
    enable_tensorboard: bool = flag(False, "write TensorBoard event files")
    tensorboard_path: str | None = flag(
        None, "folder of the event files; default: OUTPUT_DIR/tensorboard", needs=["enable_tensorboard"]
    )
    local_rank: int = flag(-1, "set by the deepspeed launcher; ignored, the environment says it too")

    def problems(self) -> list[str]:
        problems = []
        if self.resume not in ("auto", "never") and not Path(self.resume).is_dir():
            problems.append(f"--resume {self.resume}: wants auto, never, or the folder of a checkpoint")
        return problems + _unwritable(self.output_dir)


def _unwritable(folder: str) -> list[str]:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        probe = Path(folder, ".writable")
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        return [f"--output_dir {folder}: cannot be written ({error.strerror}); name another folder"]
    return []


@dataclass
class DeviceArguments:
    """Numbers and devices: precision, offload, the DeepSpeed configuration."""

    _argument_group_name: ClassVar[str] = "devices"
    dtype: Literal["bf16", "fp16", "fp32"] = flag(
        "bf16", "precision of weights and activations; Adam's states are fp32"
    )
    offload: bool = flag(False, "keep optimizer states (and ZeRO-3 parameters) in host memory")
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass to save memory")
    deterministic: bool = flag(False, "on GPUs: operations that give the same bits every time, where there are some")
    deepspeed_config: str | None = flag(None, "JSON file merged over the generated DeepSpeed configuration")

    def problems(self) -> list[str]:
        from deepspeed.accelerator import get_accelerator

        problems = []
        if self.dtype == "fp16" and get_accelerator().device_name() == "cpu":
            problems.append("--dtype fp16: a CPU cannot train in it; take bf16 or fp32")
        if self.deepspeed_config:
            problems += _not_a_json_object("--deepspeed_config", self.deepspeed_config)
        return problems


def _not_a_json_object(flag: str, path: str) -> list[str]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        return [f"{flag} {path}: cannot be read ({error.strerror})"]
    except ValueError as error:
        return [f"{flag} {path}: not valid JSON ({error})"]
    return [] if isinstance(content, dict) else [f"{flag} {path}: wants a JSON object of DeepSpeed settings"]


@dataclass
class DataArguments:
    """Where rows come from and what becomes of them."""

    _argument_group_name: ClassVar[str] = "data"
    data_path: list[str] = flag([], "files, folders, save_to_disk folders or hub names, each with an optional :WEIGHT")
    data_split: str | None = flag(None, "shares of the rows for steps 1, 2, 3, such as 2,4,4; default: all to each")
    data_output_path: str | None = flag(None, "folder of the prepared Arrow data; default: OUTPUT_DIR/data")
    eval_data_path: list[str] = flag(
        [], "rows to evaluate on; default: the sources' own test split, or a held-out share"
    )
    eval_fraction: float = flag(0.05, "share held out where a source has no split for it", at_least=0, below=1)
    max_bad_rows: int = flag(10, "bad rows to set aside before the run stops with the first ones named", at_least=0)
    overlong: Literal["truncate", "drop"] = flag("truncate", "too long: cut the prompt from the left, or drop the row")
    add_eot_token: bool = flag(False, "add <|endoftext|> to the tokenizer and end responses with it")

    def problems(self) -> list[str]:
        return [] if self.data_path else ["--data_path: name at least one file, folder or hub data set"]


@dataclass
class OptimizerArguments:
    """AdamW and its schedule; learning rates belong to the models."""

    _argument_group_name: ClassVar[str] = "optimizer"
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = flag(
        "cosine", "shape of the learning rate after warm-up"
    )
    num_warmup_steps: int = flag(0, "optimizer steps of linear warm-up", at_least=0)
    max_grad_norm: float = flag(1.0, "clip the global gradient norm here; 0: do not clip", at_least=0)
    adam_beta1: float = flag(0.9, "decay of the first moment", at_least=0, below=1)
    adam_beta2: float = flag(0.95, "decay of the second moment", at_least=0, below=1)
    gradient_accumulation_steps: int = flag(1, "micro-batches per optimizer step and device", at_least=1)

    def problems(self) -> list[str]:
        if self.lr_scheduler_type == "constant" and self.num_warmup_steps:
            return ["--lr_scheduler_type constant ignores --num_warmup_steps: take constant_with_warmup"]
        return []


@dataclass
class LoraArguments:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685); their ranks are the models' own flags."""

    _argument_group_name: ClassVar[str] = "adapters"
    lora_module_name: str = flag(
        "all", "adapt linear layers whose name contains this; all: every one but the head", needs=LORA_FLAGS
    )
    lora_learning_rate: float = flag(5e-4, "peak learning rate of the adapters", above=0, needs=LORA_FLAGS)
    only_optimize_lora: bool = flag(False, "freeze everything but the adapters (and a scalar head)")

    def problems(self) -> list[str]:
        return []


@dataclass
class ModelArguments:
    """The one model of steps 1 and 2."""

    _argument_group_name: ClassVar[str] = "model"
    model_name_or_path: str = flag("", "Hugging Face folder or hub name of the model to start from")
    max_seq_len: int = flag(512, "prompt and response together", at_least=2)
    per_device_train_batch_size: int = flag(16, "sequences (pairs in step 2) per forward pass and device", at_least=1)
    per_device_eval_batch_size: int = flag(16, "the same, in evaluation", at_least=1)
    learning_rate: float = flag(1e-5, "peak learning rate", above=0)
    weight_decay: float = flag(0.0, "decoupled weight decay of matrices; biases and norms have none", at_least=0)
    dropout: float | None = flag(None, f"{DROPOUT_HELP}; default: the model's own", at_least=0, below=1)
    zero_stage: Literal[0, 1, 2, 3] = flag(2, ZERO_HELP)
    lora_dim: int = flag(0, LORA_HELP, at_least=0)

    def problems(self) -> list[str]:
        return [] if self.model_name_or_path else ["--model_name_or_path: name the model to start from"]


@dataclass
class SupervisedArguments:
    """Step 1 alone."""

    _argument_group_name: ClassVar[str] = "supervised fine-tuning"
    train_on_prompt: bool = flag(False, "train on the prompt's tokens too, as DeepSpeed-Chat did")

    def problems(self) -> list[str]:
        return []


@dataclass
class RewardModelArguments:
    """Step 2 alone."""

    _argument_group_name: ClassVar[str] = "reward model"
    centering_coef: float = flag(0.0, "weight of (chosen + rejected)^2, which keeps scores around zero", at_least=0)

    def problems(self) -> list[str]:
        return []


@dataclass
class RLHFModelArguments:
    """The four models of step 3."""

    _argument_group_name: ClassVar[str] = "models"
    actor_model_name_or_path: str = flag("", "step 1's export; the reference model starts from it too")
    reward_model_name_or_path: str | None = flag(None, "step 2's export; default: the critic's path")
    critic_model_name_or_path: str | None = flag(None, "where the critic starts; default: the reward model's path")
    actor_learning_rate: float = flag(1e-6, "peak learning rate of the actor", above=0)
    critic_learning_rate: float = flag(5e-6, "peak learning rate of the critic", above=0)
    actor_weight_decay: float = flag(0.0, "weight decay of the actor's matrices", at_least=0)
    critic_weight_decay: float = flag(0.0, "weight decay of the critic's matrices", at_least=0)
    actor_zero_stage: Literal[0, 1, 2, 3] = flag(2, f"actor's {ZERO_HELP}; ref follows stage 3")
    critic_zero_stage: Literal[0, 1, 2, 3] = flag(2, f"critic's {ZERO_HELP}; reward follows stage 3")
    actor_lora_dim: int = flag(0, LORA_HELP, at_least=0)
    critic_lora_dim: int = flag(0, LORA_HELP, at_least=0)
    actor_dropout: float = flag(0.0, f"{DROPOUT_HELP}; above 0 the first ratio is no longer 1", at_least=0, below=1)
    critic_dropout: float = flag(0.0, DROPOUT_HELP, at_least=0, below=1)
    offload_reference_model: bool = flag(False, "keep the reference model's parameters in host memory (ZeRO-3)")
    offload_reward_model: bool = flag(False, "keep the reward model's parameters in host memory (ZeRO-3)")
    enable_ema: bool = flag(False, "keep and export an exponential moving average of the actor")
    ema_decay: float = flag(
        0.992, "share of the old average kept at each step", at_least=0, below=1, needs=["enable_ema"]
    )

    def problems(self) -> list[str]:
        problems = []
        if not self.actor_model_name_or_path:
            problems.append("--actor_model_name_or_path: name the model to train, usually step 1's output folder")
        if not (self.reward_model_name_or_path or self.critic_model_name_or_path):
            problems.append("--reward_model_name_or_path: name the reward model, usually step 2's output folder")
        return problems


@dataclass
class SamplingArguments:
    """How responses are made, and who watches them."""

    _argument_group_name: ClassVar[str] = "sampling"
    max_prompt_seq_len: int = flag(256, "longest prompt", at_least=1)
    max_answer_seq_len: int = flag(256, "longest response, its EOS included", at_least=1)
    per_device_generation_batch_size: int = flag(16, "prompts per rollout batch and device", at_least=1)
    temperature: float = flag(
        1.0, "softens the distribution that is sampled; log-probs are taken under it too", above=0
    )
    top_k: int = flag(0, "sample among this many tokens; 0: all. Otherwise the policy ratio is biased", at_least=0)
    top_p: float = flag(
        1.0, "sample within this probability mass. Below 1 the policy ratio is biased", above=0, at_most=1
    )
    judge: str | None = flag(
        None, "FILE.py:FUNCTION(prompts, responses, rows) -> scores; step 3 watches, never trains on it"
    )

    def problems(self) -> list[str]:
        if self.judge and not Path(self.judge.partition(":")[0]).is_file():
            return [f"--judge {self.judge}: there is no file {self.judge.partition(':')[0]}; write FILE.py:FUNCTION"]
        return []


@dataclass
class PairArguments(SamplingArguments):
    """Pairs sampled from a model and labelled by a judge."""

    model_name_or_path: str = flag("", "the causal language model that answers")
    num_samples_per_prompt: int = flag(4, "answers sampled for each prompt", at_least=2)
    pairs_per_prompt: int = flag(1, "at most so many pairs of each prompt's answers", at_least=1)

    def problems(self) -> list[str]:
        needed = ("model_name_or_path", "judge")
        return [f"--{name}: is needed" for name in needed if not vars(self)[name]] + super().problems()


@dataclass
class RolloutArguments(SamplingArguments):
    """Rollouts of step 3."""

    _argument_group_name: ClassVar[str] = "rollouts"
    generation_batches: int = flag(1, "rollout batches per iteration", at_least=1)
    enable_hybrid_engine: bool = flag(True, "decode with dschat.generation; else with transformers' generate")
    rollout_engine: Literal["hybrid", "transformers"] | None = flag(
        None, "the same choice by name; default: hybrid, unless --enable_hybrid_engine False"
    )
    generation_slots: int = flag(0, "rows decoded at once per device; 0: as many as memory allows", at_least=0)
    generation_memory_fraction: float = flag(
        0.8, "share of the device's free memory that keys and values of a rollout may take", above=0, at_most=1
    )
    pin_generation_buffers: bool = flag(False, "keep keys, values, copied weights and captured steps between rollouts")
    judge_timeout: float = flag(300.0, "seconds that the judge may take for a rollout batch", above=0, needs=["judge"])
    judge_retries: int = flag(2, "how often it is asked again where it fails", at_least=0, needs=["judge"])
    print_answers: bool = flag(False, "print sampled answers to the console")
    print_answers_interval: int = flag(1, "print them every so many iterations", at_least=1, needs=["print_answers"])

    @property
    def uses_hybrid_engine(self) -> bool:
        return self.enable_hybrid_engine if self.rollout_engine is None else self.rollout_engine == "hybrid"


@dataclass
class PPOArguments:
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) with a KL penalty in the reward."""

    _argument_group_name: ClassVar[str] = "PPO"
    per_device_training_batch_size: int = flag(16, "sequences per forward pass of an update, per device", at_least=1)
    ppo_epochs: int = flag(1, "passes over each rollout", at_least=1)
    kl_coef: float = flag(0.1, "price of a nat of divergence from the reference model", at_least=0)
    kl_estimator: Literal["k1", "k2", "k3"] = flag("k1", "estimator of that divergence")
    clip_range: float = flag(0.2, "policy ratio is clipped to 1 +- this", above=0)
    value_clip_range: float = flag(0.2, "values may move this far from the old ones per rollout", above=0)
    reward_clip: float = flag(5.0, "scores are clipped to +- this; 0: not at all", at_least=0)
    missing_eos_penalty: float = flag(0.0, "taken off the score of a response that did not end", at_least=0)
    gamma: float = flag(1.0, "discount per token", at_least=0, at_most=1)
    gae_lambda: float = flag(0.95, "bias-variance trade of generalised advantage estimation", at_least=0, at_most=1)
    whiten_advantages: bool = flag(True, "advantages to zero mean and unit variance over the rollout, all ranks")
    old_logprobs: Literal["recompute", "rollout"] = flag(
        "recompute", "what the ratio starts from: a forward pass of the actor, or the decoder's own log-probs"
    )
    rollout_correction: Literal["none", "tis"] = flag(
        "none", "tis: weigh the policy loss by min(actor / decoder, cap)", needs=["old_logprobs=recompute"]
    )
    rollout_correction_cap: float = flag(
        2.0, "no such weight is larger than this", above=0, needs=["rollout_correction=tis"]
    )
    stop_at_kl: float = flag(0.0, "end, and export, once an iteration's KL is this many nats; 0: never", at_least=0)
    dump_step: int = flag(0, "write all that this iteration's first update reads and makes; 0: none", at_least=0)
    unsupervised_dataset_name: str | None = flag(None, "texts for the pretraining loss mixed into the actor's update")
    unsup_coef: float = flag(0.0, "weight of that loss (PTX); 27.8 in InstructGPT", at_least=0)

    def problems(self) -> list[str]:
        if (self.unsup_coef > 0) != bool(self.unsupervised_dataset_name):
            return ["--unsup_coef and --unsupervised_dataset_name: give both or neither"]
        return []
