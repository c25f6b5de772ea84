"""Flags for the models of each step, and for the objectives of steps 1 and 2."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.arguments.command_line import flag
from dschat.arguments.optimizer import LARGEST_RATE

LARGEST_RANK = 65536
ZERO_HELP = "ZeRO stage: 0 replicates, 1 shards optimizer states, 2 gradients too, 3 parameters too"
LORA_HELP = "rank of the adapters; 0: none"
DROPOUT_HELP = "override every dropout of the model"
TRUST_HELP = "run the Python code that a model or tokenizer brings along; without it such a model is refused"


@dataclass
class ModelArguments:
    """The trained model of steps 1 and 2."""

    _argument_group_name: ClassVar[str] = "model"
    model_name_or_path: str = flag(
        "", "Hugging Face folder or hub name of the model to start from", on_resume="refuse"
    )
    max_seq_len: int = flag(512, "prompt and response together", at_least=2, on_resume="refuse")
    per_device_train_batch_size: int = flag(16, "sequences (pairs in step 2) per forward pass and device", at_least=1)
    per_device_eval_batch_size: int = flag(16, "the same, in evaluation", at_least=1)
    learning_rate: float = flag(1e-5, "peak learning rate", above=0, at_most=LARGEST_RATE)
    weight_decay: float = flag(
        0.0, "decoupled weight decay of matrices; biases and norms have none", at_least=0, at_most=LARGEST_RATE
    )
    dropout: float | None = flag(None, f"{DROPOUT_HELP}; default: the model's own", at_least=0, below=1)
    zero_stage: Literal[0, 1, 2, 3] = flag(2, ZERO_HELP)
    lora_dim: int = flag(0, LORA_HELP, at_least=0, at_most=LARGEST_RANK, on_resume="refuse")
    trust_remote_code: bool = flag(False, TRUST_HELP)

    def problems(self) -> list[str]:
        return [] if self.model_name_or_path else ["--model_name_or_path: name the model to start from"]


@dataclass
class SupervisedArguments:
    """Flags of step 1 only."""

    _argument_group_name: ClassVar[str] = "supervised fine-tuning"
    train_on_prompt: bool = flag(False, "train on the prompt's tokens too, as DeepSpeed-Chat did", on_resume="refuse")
    packing: bool = flag(
        False, "several conversations a row of --max_seq_len; batch sizes then count such rows", on_resume="refuse"
    )

    def problems(self) -> list[str]:
        return []


@dataclass
class RewardModelArguments:
    """Flags of the reward model step only."""

    _argument_group_name: ClassVar[str] = "reward model"
    centering_coef: float = flag(0.0, "weight of (chosen + rejected)^2, which keeps scores around zero", at_least=0)

    def problems(self) -> list[str]:
        return []


@dataclass
class RLHFModelArguments:
    """Actor, critic, reference and reward model of step 3."""

    _argument_group_name: ClassVar[str] = "models"
    actor_model_name_or_path: str = flag(
        "", "step 1's export; the reference model starts from it too", on_resume="refuse"
    )
    reward_model_name_or_path: str | None = flag(
        None, "step 2's export, a source of --reward; default: the critic's path, where no --reward is given",
        on_resume="refuse",
    )
    critic_model_name_or_path: str | None = flag(
        None, "where the critic starts; default: the reward model's path, else the actor's with a new head",
        on_resume="refuse",
    )
    actor_learning_rate: float = flag(1e-6, "peak learning rate of the actor", above=0, at_most=LARGEST_RATE)
    critic_learning_rate: float = flag(5e-6, "peak learning rate of the critic", above=0, at_most=LARGEST_RATE)
    actor_weight_decay: float = flag(0.0, "weight decay of the actor's matrices", at_least=0, at_most=LARGEST_RATE)
    critic_weight_decay: float = flag(0.0, "weight decay of the critic's matrices", at_least=0, at_most=LARGEST_RATE)
    actor_zero_stage: Literal[0, 1, 2, 3] = flag(2, f"actor's {ZERO_HELP}; ref follows stage 3")
    critic_zero_stage: Literal[0, 1, 2, 3] = flag(2, f"critic's {ZERO_HELP}; reward follows stage 3")
    actor_lora_dim: int = flag(0, LORA_HELP, at_least=0, at_most=LARGEST_RANK, on_resume="refuse")
    critic_lora_dim: int = flag(0, LORA_HELP, at_least=0, at_most=LARGEST_RANK, on_resume="refuse")
    actor_dropout: float = flag(0.0, f"{DROPOUT_HELP}; above 0 the first ratio is no longer 1", at_least=0, below=1)
    critic_dropout: float = flag(0.0, DROPOUT_HELP, at_least=0, below=1)
    offload_reference_model: bool = flag(False, "keep the reference model's parameters in host memory (ZeRO-3)")
    offload_reward_model: bool = flag(False, "keep the reward model's parameters in host memory (ZeRO-3)")
    enable_ema: bool = flag(False, "keep and export an exponential moving average of the actor")
    ema_decay: float = flag(
        0.992, "share of the old average kept at each step", at_least=0, below=1, needs=["enable_ema"]
    )
    trust_remote_code: bool = flag(False, TRUST_HELP)

    def problems(self) -> list[str]:
        problems = []
        if not self.actor_model_name_or_path:
            problems.append("--actor_model_name_or_path: name the model to train, usually step 1's output folder")
        return problems

    @property
    def critic_path(self) -> str:
        """Model that the critic is initialised from."""
        return self.critic_model_name_or_path or self.reward_model_name_or_path or self.actor_model_name_or_path
