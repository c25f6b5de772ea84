"""Flags for the RL algorithm of step 3: advantages, policy loss, KL, clipping."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.arguments.flags import flag
from dschat.losses.policy_table import POLICY_LOSSES
from dschat.rlhf.algorithms import ALGORITHMS, DEFAULTS

# `needs` values: policy losses that clip the probability ratio.
CLIPPED = tuple(f"policy_loss={name}" for name, loss in POLICY_LOSSES.items() if loss.clip_range)
DISCOUNTED = tuple(f"algorithm={name}" for name, algorithm in ALGORITHMS.items() if algorithm.discounts)
BY_ALGORITHM = "Default: by --algorithm."


@dataclass
class PPOArguments:
    """Policy gradients: PPO (Schulman et al. 2017, arXiv:1707.06347) and its critic-free relatives.

    Fields that are None get the default of the algorithm or of the policy loss.
    """

    _argument_group_name: ClassVar[str] = "algorithm"
    algorithm: str = flag(
        "ppo",
        "RL algorithm: sets the advantage estimator and the defaults below. Only ppo trains a critic.",
        choices=ALGORITHMS,
        on_resume="refuse",
    )
    num_samples_per_prompt: int | None = flag(
        None, f"Responses sampled for each prompt. {BY_ALGORITHM}", at_least=1, at_most=65536, on_resume="refuse"
    )
    per_device_training_batch_size: int = flag(
        16, "Sequences per forward pass and device, in scoring and in updates.", at_least=1, on_resume="apply"
    )
    ppo_epochs: int = flag(1, "Epochs over each rollout batch.", at_least=1, on_resume="refuse")

    policy_loss: str = flag("ppo_clip", "Policy loss function.", choices=POLICY_LOSSES, on_resume="apply")
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] | None = flag(
        None, f"How the policy loss is averaged over tokens and sequences. {BY_ALGORITHM}", on_resume="apply"
    )
    clip_range: float | None = flag(
        None,
        "Clip range of the policy ratio: 1 - clip_range to 1 + clip_range. Default: by --policy_loss.",
        above=0,
        needs=CLIPPED,
        on_resume="apply",
    )
    clip_range_low: float | None = flag(
        None, "Lower clip range of the policy ratio. Default: --clip_range.", at_least=0, at_most=1, on_resume="apply"
    )
    clip_range_high: float | None = flag(
        None, "Upper clip range of the policy ratio. Default: --clip_range.", at_least=0, on_resume="apply"
    )
    dual_clip: float = flag(
        0.0,
        "Dual-clip PPO: upper bound of the policy ratio for negative advantages, usually 3; 0: none.",
        at_least=0,
        needs=["policy_loss=ppo_clip"],
        on_resume="apply",
    )
    sapo_positive_temperature: float = flag(
        1.0,
        "SAPO: temperature of the soft gate for tokens with positive advantage; higher gates off-policy tokens more.",
        above=0,
        needs=["policy_loss=sapo"],
        on_resume="apply",
    )
    sapo_negative_temperature: float = flag(
        1.05,
        "SAPO: temperature of the soft gate for tokens with negative advantage.",
        above=0,
        needs=["policy_loss=sapo"],
        on_resume="apply",
    )
    entropy_coef: float = flag(
        0.0,
        "Coefficient of the entropy bonus (nats per token) in the policy loss; 0: none.",
        at_least=0,
        on_resume="apply",
    )

    kl_coef: float | None = flag(
        None,
        f"Coefficient of the KL penalty, per nat; 0: none, and no reference model. {BY_ALGORITHM}",
        at_least=0,
        on_resume="apply",
    )
    kl_in: Literal["reward", "loss"] | None = flag(
        None, f"Apply the KL penalty to the token rewards, or as a term of the loss. {BY_ALGORITHM}", on_resume="apply"
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] | None = flag(
        None, f"KL estimator; k3+ has the value of k3 and the gradient of k2. {BY_ALGORITHM}", on_resume="apply"
    )
    kl_clip: float = flag(
        0.0,
        "Upper bound of a token's k3 estimate, in nats (verl: 10); gradients vanish beyond it, except with "
        "k3+. 0: none.",
        at_least=0,
        needs=["kl_estimator=k3", "kl_estimator=k3+"],
        on_resume="apply",
    )
    kl_target: float = flag(
        0.0,
        "Target KL divergence in nats per response, to which --kl_coef is adapted; 0: fixed coefficient.",
        at_least=0,
        on_resume="apply",
    )
    kl_horizon: float = flag(
        10000.0,
        "Number of responses over which --kl_coef may change by 20 percent.",
        above=0,
        needs=["kl_target"],
        on_resume="apply",
    )
    ref_refresh_interval: int = flag(
        0, "Copy the actor into the reference model every N iterations; 0: never.", at_least=0, on_resume="apply"
    )

    value_clip_range: float = flag(
        0.2,
        "Clip range of the critic's values around those of the rollout.",
        above=0,
        needs=["algorithm=ppo"],
        on_resume="apply",
    )
    actor_freeze_steps: int = flag(0, "Train only the critic for the first N updates.", at_least=0, on_resume="apply")
    gamma: float = flag(1.0, "Discount factor per token.", at_least=0, at_most=1, needs=DISCOUNTED, on_resume="apply")
    gae_lambda: float = flag(
        0.95,
        "Lambda of generalised advantage estimation.",
        at_least=0,
        at_most=1,
        needs=["algorithm=ppo"],
        on_resume="apply",
    )
    whiten_advantages: bool | None = flag(
        None,
        f"Normalise advantages to zero mean and unit variance over the rollout batch of all ranks. {BY_ALGORITHM}",
        on_resume="apply",
    )

    reward_clip: float = flag(
        5.0, "Clip scores to [-reward_clip, reward_clip]; 0: no clipping.", at_least=0, on_resume="apply"
    )
    missing_eos_penalty: float = flag(
        0.0, "Subtracted from the score of a response without EOS; 0: none.", at_least=0, on_resume="apply"
    )
    overlong_buffer: int = flag(
        0,
        "Tokens before --max_answer_seq_len in which the overlong penalty rises linearly (DAPO); 0: no penalty.",
        at_least=0,
        on_resume="apply",
    )
    overlong_factor: float = flag(
        1.0,
        "Largest overlong penalty, subtracted from the score.",
        at_least=0,
        needs=["overlong_buffer"],
        on_resume="apply",
    )
    mask_truncated: bool = flag(False, "Exclude responses without EOS from the loss.", on_resume="apply")
    dynamic_sampling: int = flag(
        0,
        "Maximum sampling rounds in which groups with equal scores are replaced by new prompts (DAPO); 0: "
        "keep such groups.",
        at_least=0,
        on_resume="refuse",
    )

    old_logprobs: Literal["recompute", "rollout"] = flag(
        "recompute",
        "Old log-probs of the policy ratio: recompute them with the actor, or use those of the rollout engine.",
        on_resume="apply",
    )
    rollout_correction: Literal["none", "tis", "mis", "seq_tis", "seq_mis"] = flag(
        "none",
        "Importance weights between actor and rollout engine in the policy loss: truncated (tis) or masked "
        "(mis), per token or per sequence (seq_).",
        needs=["old_logprobs=recompute"],
        on_resume="apply",
    )
    rollout_correction_cap: float = flag(
        2.0,
        "Maximum importance weight; larger ones are truncated (tis) or masked (mis).",
        above=0,
        needs=[f"rollout_correction={name}" for name in ("tis", "mis", "seq_tis", "seq_mis")],
        on_resume="apply",
    )
    rollout_correction_floor: float = flag(
        0.5,
        "Minimum importance weight; smaller ones are masked.",
        at_least=0,
        needs=["rollout_correction=mis", "rollout_correction=seq_mis"],
        on_resume="apply",
    )
    stop_at_kl: float = flag(
        0.0,
        "Stop training and export the model once an iteration's KL divergence reaches this, in nats; 0: never.",
        at_least=0,
        on_resume="apply",
    )
    dump_step: int = flag(
        0,
        "Iteration whose first update is written to OUTPUT_DIR/dump, with inputs and results, for "
        "scripts/replay.py; 0: none.",
        at_least=0,
        on_resume="apply",
    )
    unsupervised_dataset_name: str | None = flag(
        None,
        "Texts for the pretraining loss that is added to the actor's loss (PTX). Default: none.",
        on_resume="refuse",
    )
    unsup_coef: float = flag(
        0.0, "Coefficient of the pretraining loss (InstructGPT: 27.8); 0: none.", at_least=0, on_resume="apply"
    )

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
            problems.append("--unsup_coef and --unsupervised_dataset_name: set both or neither")
        if ALGORITHMS[self.algorithm].compares_group and self.num_samples_per_prompt < 2:
            problems.append(
                f"--algorithm {self.algorithm} compares responses to one prompt, but --num_samples_per_prompt is "
                f"{self.num_samples_per_prompt}: set it to 2 or more"
            )
        if self.dynamic_sampling and self.num_samples_per_prompt < 2:
            problems.append(
                "--dynamic_sampling compares the scores of responses to one prompt: "
                "set --num_samples_per_prompt to 2 or more"
            )
        if self.actor_freeze_steps and not self.trains_critic:
            problems.append(
                f"--actor_freeze_steps {self.actor_freeze_steps}: --algorithm {self.algorithm} has no critic, so "
                "nothing would be trained: remove it, or use --algorithm ppo"
            )
        if 0 < self.dual_clip <= 1:
            problems.append(f"--dual_clip {self.dual_clip}: must be above 1, as an upper bound of ratios; 3 is usual")
        if self.kl_target and not self.kl_coef:
            problems.append("--kl_target adapts --kl_coef, which is 0: set an initial coefficient")
        if self.ref_refresh_interval and not self.needs_reference:
            problems.append("--ref_refresh_interval: there is no reference model with --kl_coef 0; set a coefficient")
        if self.rollout_correction.endswith("mis") and self.rollout_correction_floor >= self.rollout_correction_cap:
            problems.append(
                f"--rollout_correction_floor {self.rollout_correction_floor} is not below --rollout_correction_cap "
                f"{self.rollout_correction_cap}: every weight would be masked"
            )
        return problems
