"""Flags for the RL algorithm of step 3: advantages, policy loss, KL, clipping."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.arguments.command_line import flag
from dschat.losses.policy import POLICY_LOSSES
from dschat.rlhf.algorithms import ALGORITHMS, DEFAULTS

# `needs` values: policy losses that clip the probability ratio.
CLIPPED = tuple(f"policy_loss={name}" for name, loss in POLICY_LOSSES.items() if loss.clip_range)
DISCOUNTED = tuple(f"algorithm={name}" for name, algorithm in ALGORITHMS.items() if algorithm.discounts)
BY_ALGORITHM = "default: as --algorithm has it"


@dataclass
class PPOArguments:
    """Policy gradients: PPO (Schulman et al. 2017, arXiv:1707.06347) and its critic-free relatives.

    Fields that are None take the default of the algorithm or of the policy loss.
    """

    _argument_group_name: ClassVar[str] = "algorithm"
    algorithm: str = flag(
        "ppo", "how advantages are estimated; only ppo trains a critic", choices=ALGORITHMS, on_resume="refuse"
    )
    num_samples_per_prompt: int | None = flag(
        None, f"responses to each prompt; {BY_ALGORITHM}", at_least=1, at_most=65536, on_resume="refuse"
    )
    per_device_training_batch_size: int = flag(
        16, "sequences per forward pass (scoring, updates), per device", at_least=1
    )
    ppo_epochs: int = flag(1, "passes over each rollout", at_least=1, on_resume="refuse")

    policy_loss: str = flag("ppo_clip", "loss of ratio and advantage", choices=POLICY_LOSSES)
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] | None = flag(
        None, f"how tokens and responses are averaged; {BY_ALGORITHM}"
    )
    clip_range: float | None = flag(
        None, "policy ratio is clipped to 1 +- this; default: the loss's own", above=0, needs=CLIPPED
    )
    clip_range_low: float | None = flag(None, "the lower side of it; default: --clip_range", at_least=0, at_most=1)
    clip_range_high: float | None = flag(None, "the upper side of it; default: --clip_range", at_least=0)
    dual_clip: float = flag(
        0.0, "bounds ratios of negative advantages too; 3 is usual, 0: not", at_least=0, needs=["policy_loss=ppo_clip"]
    )
    sapo_positive_temperature: float = flag(
        1.0, "how soon SAPO forgets tokens of positive advantage", above=0, needs=["policy_loss=sapo"]
    )
    sapo_negative_temperature: float = flag(1.05, "and the others", above=0, needs=["policy_loss=sapo"])
    entropy_coef: float = flag(0.0, "reward of a nat of entropy per token, in the loss", at_least=0)

    kl_coef: float | None = flag(
        None, f"coefficient of the KL divergence from the reference model, per nat; {BY_ALGORITHM}; 0: no such model",
        at_least=0,
    )
    kl_in: Literal["reward", "loss"] | None = flag(None, f"where the KL penalty is applied; {BY_ALGORITHM}")
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] | None = flag(
        None, f"estimator of the divergence; k3+: value of k3, gradient of k2; {BY_ALGORITHM}"
    )
    kl_clip: float = flag(
        0.0, "nats: no token's estimate of k3 is larger, nor has it a gradient beyond (k3+ keeps its own); 10 in verl, "
        "0: not clipped", at_least=0, needs=["kl_estimator=k3", "kl_estimator=k3+"],
    )  # fmt: skip
    kl_target: float = flag(0.0, "nats per response that --kl_coef is adapted to; 0: it is fixed", at_least=0)
    kl_horizon: float = flag(10000.0, "responses in which it may change by a fifth", above=0, needs=["kl_target"])
    ref_refresh_interval: int = flag(
        0, "the actor becomes the reference model every so many iterations; 0: never", at_least=0
    )

    value_clip_range: float = flag(
        0.2, "values may move this far from the old ones per rollout", above=0, needs=["algorithm=ppo"]
    )
    actor_freeze_steps: int = flag(0, "the critic alone is trained for so many updates", at_least=0)
    gamma: float = flag(
        1.0, "discount per token", at_least=0, at_most=1,
        needs=DISCOUNTED,
    )  # fmt: skip
    gae_lambda: float = flag(
        0.95, "bias-variance trade of generalised advantage estimation", at_least=0, at_most=1, needs=["algorithm=ppo"]
    )
    whiten_advantages: bool | None = flag(
        None, f"advantages to zero mean and unit variance over the rollout, all ranks; {BY_ALGORITHM}"
    )

    reward_clip: float = flag(5.0, "scores are clipped to +- this; 0: not at all", at_least=0)
    missing_eos_penalty: float = flag(0.0, "taken off the score of a response that did not end", at_least=0)
    overlong_buffer: int = flag(
        0, "the last so many tokens of --max_answer_seq_len cost more and more (DAPO); 0: nothing", at_least=0
    )
    overlong_factor: float = flag(1.0, "what a response loses at the end of them", at_least=0,
                                  needs=["overlong_buffer"])  # fmt: skip
    mask_truncated: bool = flag(False, "learn nothing from responses that did not end")
    dynamic_sampling: int = flag(
        0, "rounds in which groups whose scores are all alike are replaced by other prompts (DAPO); 0: none",
        at_least=0,
        on_resume="refuse",
    )  # fmt: skip

    old_logprobs: Literal["recompute", "rollout"] = flag(
        "recompute", "what the ratio starts from: a forward pass of the actor, or the decoder's own log-probs"
    )
    rollout_correction: Literal["none", "tis", "mis", "seq_tis", "seq_mis"] = flag(
        "none",
        "weigh the policy loss by actor / decoder: truncated, or masked outside the bounds, per token or response",
        needs=["old_logprobs=recompute"],
    )
    rollout_correction_cap: float = flag(
        2.0, "no such weight is larger than this", above=0,
        needs=[f"rollout_correction={name}" for name in ("tis", "mis", "seq_tis", "seq_mis")],
    )  # fmt: skip
    rollout_correction_floor: float = flag(
        0.5, "smaller ones are masked", at_least=0, needs=["rollout_correction=mis", "rollout_correction=seq_mis"]
    )
    stop_at_kl: float = flag(0.0, "end, and export, once an iteration's KL is this many nats; 0: never", at_least=0)
    dump_step: int = flag(0, "write all that this iteration's first update reads and makes; 0: none", at_least=0)
    unsupervised_dataset_name: str | None = flag(
        None, "texts for the pretraining loss mixed into the actor's update", on_resume="refuse"
    )
    unsup_coef: float = flag(0.0, "weight of that loss (PTX); 27.8 in InstructGPT", at_least=0)

    def __post_init__(self) -> None:
        for name, value in (DEFAULTS | ALGORITHMS[self.algorithm].defaults).items():
            if vars(self)[name] is None:
                setattr(self, name, value)
        low, high = POLICY_LOSSES[self.policy_loss].clip_range or (0.2, 0.2)
        if self.clip_range is not None:
            low, high = min(self.clip_range, 1.0), self.clip_range  # the probability ratio is never negative
        self.clip_range_low = low if self.clip_range_low is None else self.clip_range_low
        self.clip_range_high = high if self.clip_range_high is None else self.clip_range_high

    @property
    def trains_critic(self) -> bool:
        return ALGORITHMS[self.algorithm].trains_critic

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0 or self.kl_target > 0 or self.stop_at_kl > 0

    def problems(self) -> list[str]:
        problems = []
        if (self.unsup_coef > 0) != bool(self.unsupervised_dataset_name):
            problems.append("--unsup_coef and --unsupervised_dataset_name: give both or neither")
        if ALGORITHMS[self.algorithm].compares_group and self.num_samples_per_prompt < 2:
            problems.append(
                f"--algorithm {self.algorithm} compares responses to one prompt, but --num_samples_per_prompt is "
                f"{self.num_samples_per_prompt}: give 2 or more"
            )
        if self.dynamic_sampling and self.num_samples_per_prompt < 2:
            problems.append(
                "--dynamic_sampling asks for responses to one prompt that score differently: "
                "give --num_samples_per_prompt 2 or more"
            )
        if self.actor_freeze_steps and not self.trains_critic:
            problems.append(
                f"--actor_freeze_steps {self.actor_freeze_steps}: --algorithm {self.algorithm} has no critic, so that "
                "nothing would be trained: drop it, or take --algorithm ppo"
            )
        if 0 < self.dual_clip <= 1:
            problems.append(f"--dual_clip {self.dual_clip}: bounds ratios from above, so give more than 1; 3 is usual")
        if self.kl_target and not self.kl_coef:
            problems.append("--kl_target adapts --kl_coef, which is 0: give a coefficient to start from")
        if self.ref_refresh_interval and not self.needs_reference:
            problems.append("--ref_refresh_interval, but --kl_coef 0 builds no reference model: give a coefficient")
        if self.rollout_correction.endswith("mis") and self.rollout_correction_floor >= self.rollout_correction_cap:
            problems.append(
                f"--rollout_correction_floor {self.rollout_correction_floor} is not below --rollout_correction_cap "
                f"{self.rollout_correction_cap}: nothing would be left between them"
            )
        return problems
