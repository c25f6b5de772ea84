"""Flags for optimizer, learning-rate schedule and LoRA adapters."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dschat.arguments.flags import flag

LARGEST_RATE = 10.0  # of learning rates and weight decays
LORA_FLAGS = ("lora_dim", "actor_lora_dim", "critic_lora_dim")


@dataclass
class OptimizerArguments:
    """AdamW and its schedule; learning rates are set by the groups of the models."""

    _argument_group_name: ClassVar[str] = "optimizer"
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = flag(
        "cosine", "Shape of the learning-rate schedule after the warm-up.", on_resume="refuse"
    )
    num_warmup_steps: int = flag(0, "Optimizer steps of linear learning-rate warm-up.", at_least=0, on_resume="refuse")
    max_grad_norm: float = flag(
        1.0,
        "Maximum global gradient norm; larger gradients are scaled down to it. 0: no clipping.",
        at_least=0,
        on_resume="apply",
    )
    adam_beta1: float = flag(0.9, "AdamW: decay of the first moment.", at_least=0, below=1, on_resume="apply")
    adam_beta2: float = flag(0.95, "AdamW: decay of the second moment.", at_least=0, below=1, on_resume="apply")
    gradient_accumulation_steps: int = flag(
        1, "Micro-batches per optimizer step and device.", at_least=1, on_resume="apply"
    )

    def problems(self) -> list[str]:
        if self.lr_scheduler_type == "constant" and self.num_warmup_steps:
            return ["--lr_scheduler_type constant ignores --num_warmup_steps: use constant_with_warmup"]
        return []


@dataclass
class LoraArguments:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685); their ranks are set by the groups of the models."""

    _argument_group_name: ClassVar[str] = "adapters"
    lora_module_name: str = flag(
        "all",
        "Add adapters to linear layers whose name contains this text; all: to every one except the head.",
        needs=LORA_FLAGS,
        on_resume="refuse",
    )
    lora_target_modules: list[str] = flag(
        [], "Add adapters to the linear layers of these names alone (q_proj v_proj), instead of --lora_module_name.",
        needs=LORA_FLAGS, on_resume="refuse",
    )  # fmt: skip
    lora_alpha: float | None = flag(
        None, "Adapters are scaled by this number divided by their rank. Default: twice the rank.", above=0,
        needs=LORA_FLAGS, on_resume="refuse",
    )  # fmt: skip
    lora_dropout: float = flag(
        0.0, "Dropout on the input of the adapters.", at_least=0, below=1, needs=LORA_FLAGS, on_resume="refuse",
    )  # fmt: skip
    lora_learning_rate: float = flag(
        5e-4, "Peak learning rate of the adapters.", above=0, at_most=LARGEST_RATE, needs=LORA_FLAGS,
        on_resume="apply",
    )
    export_adapters: Literal["beside", "only"] | None = flag(
        None, "Write the adapters as a PEFT folder, OUTPUT_DIR/adapter: beside the model that they are merged into, or "
        "instead of it. Default: the merged model alone.", needs=LORA_FLAGS, on_resume="apply",
    )  # fmt: skip
    only_optimize_lora: bool = flag(
        False, "Train only the adapters and a scalar head; freeze all other parameters.", on_resume="refuse"
    )

    def problems(self) -> list[str]:
        if self.lora_target_modules and self.lora_module_name != "all":
            return ["--lora_target_modules and --lora_module_name: give one of them"]
        if self.export_adapters and not self.only_optimize_lora:
            return ["--export_adapters: the other weights are trained too, so the adapters alone are not the model: "
                    "add --only_optimize_lora"]  # fmt: skip
        return []

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of dschat.models.lora.add_lora beside the rank."""
        return {
            "module_name": self.lora_target_modules or self.lora_module_name, "alpha": self.lora_alpha,
            "dropout": self.lora_dropout, "only_optimize_lora": self.only_optimize_lora,
        }  # fmt: skip
