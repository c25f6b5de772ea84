"""Flags for preference optimisation (step2_dpo_finetuning): policy, loss, reference."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.arguments.command_line import flag
from dschat.arguments.models import DROPOUT_HELP, ModelArguments
from dschat.arguments.optimizer import LARGEST_RATE

WITH_REFERENCE = tuple(f"preference_loss={name}" for name in ("dpo", "ipo", "hinge", "robust", "kto"))
WITH_SUMS = WITH_REFERENCE[:-1]
WITH_SFT = (*WITH_SUMS, "preference_loss=simpo")


@dataclass
class PolicyArguments(ModelArguments):
    """The trained policy: the model flags of steps 1 and 2 with a lower learning rate and no dropout."""

    learning_rate: float = flag(1e-6, "peak learning rate", above=0, at_most=LARGEST_RATE)
    dropout: float = flag(
        0.0, f"{DROPOUT_HELP}; above 0 the policy differs from the reference at step 0", at_least=0, below=1
    )


@dataclass
class PreferenceArguments:
    """The preference loss; it is of pairs, or of single labelled responses (kto)."""

    _argument_group_name: ClassVar[str] = "preferences"
    preference_loss: Literal["dpo", "ipo", "hinge", "robust", "simpo", "orpo", "kto"] = flag(
        "dpo", "loss of dschat/rlhf/*_losses.py; simpo and orpo need no reference, kto takes single responses",
        on_resume="refuse",
    )
    beta: float = flag(0.1, "pull to the reference (ipo: tau; orpo: weight of the odds; simpo: 2 is usual)", above=0)
    label_smoothing: float = flag(
        0.0, "share of labels taken to be wrong", at_least=0, below=0.5,
        needs=["preference_loss=dpo", "preference_loss=robust"],
    )  # fmt: skip
    simpo_gamma: float = flag(0.5, "margin asked for, in units of reward", at_least=0, needs=["preference_loss=simpo"])
    desirable_weight: float = flag(1.0, "weight of desirable responses", at_least=0, needs=["preference_loss=kto"])
    undesirable_weight: float = flag(1.0, "weight of undesirable ones", at_least=0, needs=["preference_loss=kto"])
    length_normalized: bool | None = flag(
        None, "mean log-probs per token, not sums; default: True for ipo, else False (always with simpo and orpo)",
        needs=WITH_SUMS,
        on_resume="refuse",
    )  # fmt: skip
    sft_coef: float = flag(
        0.0, "weight of the chosen response's negative log-likelihood per token", at_least=0, needs=WITH_SFT
    )
    reference: Literal["precompute", "adapters_off"] = flag(
        "precompute",
        "log-probs of the reference: once before training, kept on disk; or at every step from the model without its "
        "adapters (needs --only_optimize_lora)",
        needs=WITH_REFERENCE,
    )
    ref_model_name_or_path: str | None = flag(
        None, "the reference; default: the model to start from", needs=WITH_REFERENCE,
        on_resume="refuse",
    )

    @property
    def kind(self) -> str:
        """The kind of data record that the loss needs."""
        return "unpaired" if self.preference_loss == "kto" else "preference"

    @property
    def reference_free(self) -> bool:
        return self.preference_loss in ("simpo", "orpo")

    @property
    def takes_means(self) -> bool:
        """Whether the loss uses mean log-probs per token instead of their sums."""
        if self.reference_free or self.length_normalized is None:
            return self.reference_free or self.preference_loss == "ipo"
        return self.length_normalized

    def problems(self) -> list[str]:
        problems = []
        if self.reference == "adapters_off" and self.ref_model_name_or_path:
            problems.append(
                f"--ref_model_name_or_path {self.ref_model_name_or_path}, but with --reference adapters_off the model "
                "itself is the reference: drop one of them"
            )
        return problems
