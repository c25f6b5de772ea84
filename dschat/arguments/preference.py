"""Flags for preference optimisation (step2_dpo_finetuning): policy, loss, reference."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.arguments.flags import flag
from dschat.arguments.models import DROPOUT_HELP, ModelArguments
from dschat.arguments.optimizer import LARGEST_RATE

# `needs` values: the losses that each flag applies to.
WITH_REFERENCE = tuple(f"preference_loss={name}" for name in ("dpo", "ipo", "hinge", "robust", "kto"))
WITH_SUMS = WITH_REFERENCE[:-1]
WITH_SFT = (*WITH_SUMS, "preference_loss=simpo")


@dataclass
class PolicyArguments(ModelArguments):
    """The trained policy: the model flags of steps 1 and 2 with a lower learning rate and no dropout."""

    learning_rate: float = flag(1e-6, "Peak learning rate.", above=0, at_most=LARGEST_RATE, on_resume="apply")
    dropout: float = flag(
        0.0,
        f"{DROPOUT_HELP} Above 0, the policy differs from the reference model at step 0.",
        at_least=0,
        below=1,
        on_resume="apply",
    )


@dataclass
class PreferenceArguments:
    """The preference loss, on pairs or on single labelled responses (kto)."""

    _argument_group_name: ClassVar[str] = "preferences"
    preference_loss: Literal["dpo", "ipo", "hinge", "robust", "simpo", "orpo", "kto"] = flag(
        "dpo",
        "Loss function; simpo and orpo use no reference model, kto trains on single labelled responses.",
        on_resume="refuse",
    )
    beta: float = flag(
        0.1,
        "Strength of the constraint to the reference model (ipo: tau; orpo: weight of the odds-ratio term; "
        "simpo: scale of the reward, usually 2).",
        above=0,
        on_resume="apply",
    )
    label_smoothing: float = flag(
        0.0,
        "Assumed fraction of flipped preference labels.",
        at_least=0,
        below=0.5,
        needs=["preference_loss=dpo", "preference_loss=robust"],
        on_resume="apply",
    )
    simpo_gamma: float = flag(
        0.5,
        "Target margin between chosen and rejected reward (SimPO's gamma).",
        at_least=0,
        needs=["preference_loss=simpo"],
        on_resume="apply",
    )
    desirable_weight: float = flag(
        1.0, "Weight of the loss on desirable responses.", at_least=0, needs=["preference_loss=kto"], on_resume="apply"
    )
    undesirable_weight: float = flag(
        1.0,
        "Weight of the loss on undesirable responses.",
        at_least=0,
        needs=["preference_loss=kto"],
        on_resume="apply",
    )
    length_normalized: bool | None = flag(
        None,
        "Use mean log-probs per token instead of sums; simpo and orpo always do. Default: True for ipo, else False.",
        needs=WITH_SUMS,
        on_resume="refuse",
    )
    sft_coef: float = flag(
        0.0,
        "Coefficient of the chosen response's negative log-likelihood per token; 0: none.",
        at_least=0,
        needs=WITH_SFT,
        on_resume="apply",
    )
    reference: Literal["precompute", "adapters_off"] = flag(
        "precompute",
        "Log-probs of the reference model: precompute them once before training and store them with the "
        "data, or compute them at every step with the adapters turned off (requires --only_optimize_lora).",
        needs=WITH_REFERENCE,
        on_resume="apply",
    )
    ref_model_name_or_path: str | None = flag(
        None, "Reference model. Default: --model_name_or_path.", needs=WITH_REFERENCE, on_resume="refuse"
    )

    @property
    def kind(self) -> str:
        """The kind of data record that the loss needs."""
        return "unpaired" if self.preference_loss == "kto" else "preference"

    @property
    def reference_free(self) -> bool:
        return self.preference_loss in ("simpo", "orpo")

    @property
    def uses_mean_logprobs(self) -> bool:
        """Whether the loss uses mean log-probs per token instead of their sums."""
        if self.reference_free or self.length_normalized is None:
            return self.reference_free or self.preference_loss == "ipo"
        return self.length_normalized

    def problems(self) -> list[str]:
        problems = []
        if self.reference == "adapters_off" and self.ref_model_name_or_path:
            problems.append(
                f"--ref_model_name_or_path {self.ref_model_name_or_path}, but with --reference adapters_off the model "
                "itself is the reference: remove one of them"
            )
        return problems
