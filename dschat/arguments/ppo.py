"""What step 3 makes of rollouts."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.command_line import flag


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
