"""Flags for the models of each step, and for the objectives of steps 1 and 2."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.arguments.flags import flag
from dschat.arguments.optimizer import LARGEST_RATE

LARGEST_RANK = 65536
ZERO_HELP = "ZeRO stage: 0 none, 1 partitions optimizer states, 2 gradients too, 3 parameters too."
LORA_HELP = "Rank of the LoRA adapters; 0: none."
DROPOUT_HELP = "Dropout probability, for every dropout layer of the model."
TRUST_HELP = "Execute Python code contained in the folders of models and tokenizers; otherwise such a model is refused."


@dataclass
class ModelArguments:
    """The trained model of steps 1 and 2."""

    _argument_group_name: ClassVar[str] = "model"
    model_name_or_path: str = flag("", "Model to train: a Hugging Face folder or hub name.", on_resume="refuse")
    max_seq_len: int = flag(
        512, "Maximum length of prompt and response together, in tokens.", at_least=2, on_resume="refuse"
    )
    per_device_train_batch_size: int = flag(
        16, "Sequences (pairs in step 2) per forward pass and device.", at_least=1, on_resume="apply"
    )
    per_device_eval_batch_size: int = flag(
        16, "Sequences (pairs in step 2) per forward pass and device in evaluation.", at_least=1, on_resume="apply"
    )
    learning_rate: float = flag(1e-5, "Peak learning rate.", above=0, at_most=LARGEST_RATE, on_resume="apply")
    weight_decay: float = flag(
        0.0,
        "Decoupled weight decay of weight matrices; biases and norms have none.",
        at_least=0,
        at_most=LARGEST_RATE,
        on_resume="apply",
    )
    dropout: float | None = flag(
        None, f"{DROPOUT_HELP} Default: as in the model's configuration.", at_least=0, below=1, on_resume="apply"
    )
    zero_stage: Literal[0, 1, 2, 3] = flag(2, ZERO_HELP, on_resume="apply")
    lora_dim: int = flag(0, LORA_HELP, at_least=0, at_most=LARGEST_RANK, on_resume="refuse")
    trust_remote_code: bool = flag(False, TRUST_HELP, on_resume="apply")

    def problems(self) -> list[str]:
        return [] if self.model_name_or_path else ["--model_name_or_path: name the model to start from"]


@dataclass
class SupervisedArguments:
    """Flags of step 1 only."""

    _argument_group_name: ClassVar[str] = "supervised fine-tuning"
    train_on_prompt: bool = flag(
        False, "Compute the loss on the tokens of the prompt too, as DeepSpeed-Chat does.", on_resume="refuse"
    )
    packing: bool = flag(
        False,
        "Pack several conversations into each row of --max_seq_len tokens; batch sizes then count packed rows.",
        on_resume="refuse",
    )

    def problems(self) -> list[str]:
        return []


@dataclass
class RewardModelArguments:
    """Flags of the reward model step only."""

    _argument_group_name: ClassVar[str] = "reward model"
    centering_coef: float = flag(
        0.0,
        "Coefficient of the loss term (chosen score + rejected score)^2, which centres scores at zero; 0: none.",
        at_least=0,
        on_resume="apply",
    )

    def problems(self) -> list[str]:
        return []


@dataclass
class RLHFModelArguments:
    """Actor, critic, reference and reward model of step 3."""

    _argument_group_name: ClassVar[str] = "models"
    actor_model_name_or_path: str = flag(
        "", "Initial actor and reference model: usually the output folder of step 1.", on_resume="refuse"
    )
    reward_model_name_or_path: str | None = flag(
        None,
        "Reward model: usually the output folder of step 2; adds it to --reward with weight 1. Default: the "
        "critic's path if there is no --reward, else none.",
        on_resume="refuse",
    )
    critic_model_name_or_path: str | None = flag(
        None,
        "Initial critic. Default: the reward model's path, else the actor's with a new scalar head.",
        on_resume="refuse",
    )
    actor_learning_rate: float = flag(
        1e-6, "Peak learning rate of the actor.", above=0, at_most=LARGEST_RATE, on_resume="apply"
    )
    critic_learning_rate: float = flag(
        5e-6, "Peak learning rate of the critic.", above=0, at_most=LARGEST_RATE, on_resume="apply"
    )
    actor_weight_decay: float = flag(
        0.0, "Decoupled weight decay of the actor's weight matrices.", at_least=0, at_most=LARGEST_RATE,
        on_resume="apply",
    )
    critic_weight_decay: float = flag(
        0.0, "Decoupled weight decay of the critic's weight matrices.", at_least=0, at_most=LARGEST_RATE,
        on_resume="apply",
    )
    actor_zero_stage: Literal[0, 1, 2, 3] = flag(
        2, f"Actor: {ZERO_HELP} With stage 3, the reference model is partitioned too.", on_resume="apply"
    )
    critic_zero_stage: Literal[0, 1, 2, 3] = flag(
        2, f"Critic: {ZERO_HELP} With stage 3, the reward model is partitioned too.", on_resume="apply"
    )
    actor_lora_dim: int = flag(0, f"Actor: {LORA_HELP}", at_least=0, at_most=LARGEST_RANK, on_resume="refuse")
    critic_lora_dim: int = flag(0, f"Critic: {LORA_HELP}", at_least=0, at_most=LARGEST_RANK, on_resume="refuse")
    actor_dropout: float = flag(
        0.0,
        f"{DROPOUT_HELP} Above 0, the policy ratio of the first update is no longer exactly 1.",
        at_least=0,
        below=1,
        on_resume="apply",
    )
    critic_dropout: float = flag(0.0, DROPOUT_HELP, at_least=0, below=1, on_resume="apply")
    offload_reference_model: bool = flag(
        False, "Keep the reference model's parameters in host memory (ZeRO-3).", on_resume="apply"
    )
    offload_reward_model: bool = flag(
        False, "Keep the reward model's parameters in host memory (ZeRO-3).", on_resume="apply"
    )
    enable_ema: bool = flag(False, "Maintain and export an exponential moving average of the actor.", on_resume="apply")
    ema_decay: float = flag(
        0.992, "Decay of the moving average per step.", at_least=0, below=1, needs=["enable_ema"], on_resume="apply"
    )
    trust_remote_code: bool = flag(False, TRUST_HELP, on_resume="apply")

    def problems(self) -> list[str]:
        problems = []
        if not self.actor_model_name_or_path:
            problems.append("--actor_model_name_or_path: name the model to train, usually step 1's output folder")
        return problems

    @property
    def critic_path(self) -> str:
        """Model that the critic is initialised from."""
        return self.critic_model_name_or_path or self.reward_model_name_or_path or self.actor_model_name_or_path
