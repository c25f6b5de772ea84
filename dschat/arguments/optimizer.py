"""Flags for optimizer, learning-rate schedule and LoRA adapters."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.arguments.command_line import flag

LARGEST_RATE = 10.0  # of learning and of weight decay
LORA_FLAGS = ("lora_dim", "actor_lora_dim", "critic_lora_dim")


@dataclass
class OptimizerArguments:
    """AdamW and its schedule; learning rates are set by the groups of the models."""

    _argument_group_name: ClassVar[str] = "optimizer"
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = flag(
        "cosine", "shape of the learning rate after warm-up",
        on_resume="refuse",
    )
    num_warmup_steps: int = flag(0, "optimizer steps of linear warm-up", at_least=0, on_resume="refuse")
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
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685); their ranks are set by the groups of the models."""

    _argument_group_name: ClassVar[str] = "adapters"
    lora_module_name: str = flag(
        "all", "adapt linear layers whose name contains this; all: every one but the head", needs=LORA_FLAGS,
        on_resume="refuse",
    )
    lora_learning_rate: float = flag(
        5e-4, "peak learning rate of the adapters", above=0, at_most=LARGEST_RATE, needs=LORA_FLAGS
    )
    only_optimize_lora: bool = flag(
        False, "freeze everything but the adapters (and a scalar head)", on_resume="refuse"
    )

    def problems(self) -> list[str]:
        return []
