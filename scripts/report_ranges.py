"""Healthy ranges of metrics: what the values of a run that learns usually are, and what to do outside.

The bounds are rules of thumb for a first diagnosis, no limits: a run may be outside and learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from report_inputs import Run

LAST_SHARE = 0.1  # of a curve, whose mean is compared with the range
STEP3, REWARD_MODEL = "step3", "step2_reward"


@dataclass(frozen=True)
class HealthyRange:
    """Bounds of a metric; None is no bound.

    Attributes:
        below, above: what to do outside.
        step: start of the names of the runs that it holds for.
    """

    low: float | None
    high: float | None
    below: str = ""
    above: str = ""
    step: str = STEP3

    @property
    def text(self) -> str:
        if self.low is None or self.high is None:
            return f"at least {self.low:g}" if self.high is None else f"at most {self.high:g}"
        return f"{self.low:g} to {self.high:g}"

    def violation(self, value: float) -> str:
        """What to do about this value; empty if it is inside."""
        if self.low is not None and value < self.low:
            return self.below
        return self.above if self.high is not None and value > self.high else ""


MISMATCH = (
    "decoder and trainer disagree by more than bf16 rounding: run scripts/doctor.py on the actor to find the cause; "
    "--old_logprobs recompute and --rollout_correction reduce the effect"
)
RATIO = "too many or too large updates of one rollout: fewer --ppo_epochs, or a lower --actor_learning_rate"
SKIPPED = "losses or gradients were not finite: lower the learning rate, or check the data of these steps"
RANGES = {
    "kl": HealthyRange(
        None, 30.0, above="the actor is far from the reference and may exploit errors of the reward: raise --kl_coef, "
        "lower --actor_learning_rate, and read the responses with the highest scores"
    ),
    "entropy": HealthyRange(
        0.05, None, below="responses hardly vary any more, so there is little left to learn from: raise --kl_coef or "
        "--entropy_coef, lower --actor_learning_rate, or raise --clip_range_high"
    ),
    "ended_by_eos": HealthyRange(
        0.8, None, below="many responses are cut at the limit: raise --max_answer_seq_len or --missing_eos_penalty, or "
        "check whether the reward prefers long responses"
    ),
    "clip_fraction": HealthyRange(None, 0.2, above=RATIO),
    "approx_kl": HealthyRange(None, 0.05, above=RATIO),
    "ratio": HealthyRange(0.9, 1.1, below=RATIO, above=RATIO),
    "explained_variance": HealthyRange(
        0.0, None, below="the critic is worse than a constant: raise --critic_learning_rate, widen --value_clip_range, "
        "or train it alone at first with --actor_freeze_steps"
    ),
    "scored": HealthyRange(
        0.95, None, below="reward sources fail: see the warnings on the console, and --reward_timeout, --reward_retries"
    ),
    "trained": HealthyRange(
        0.5, None, below="most responses are left out of the updates: they have no score, or --mask_truncated excludes "
        "them; raise --max_answer_seq_len"
    ),
    "flat_groups": HealthyRange(
        None, 0.8, above="prompts are too easy or too hard to compare responses: use others, more "
        "--num_samples_per_prompt, or --dynamic_sampling"
    ),
    "rollout_logprob_mismatch_mean": HealthyRange(None, 0.1, above=MISMATCH),
    "rollout_ratio": HealthyRange(0.9, 1.1, below=MISMATCH, above=MISMATCH),
    "accuracy": HealthyRange(
        0.55, None, below="the reward model hardly differs from chance, 0.5: check which column is chosen, use more "
        "pairs or more steps", step=REWARD_MODEL
    ),
    "skipped_updates": HealthyRange(None, 0.0, above=SKIPPED, step="step"),
    "padding": HealthyRange(
        None, 0.3, above="a large part of the computation is padding: use --remove_padding, or batches of similar "
        "lengths", step="step"
    ),
}  # fmt: skip
UPDATE_METRICS = {"clip_fraction", "approx_kl", "ratio"}  # of other meaning under other policy losses
ROLLOUT_METRICS = {"rollout_logprob_mismatch_mean", "rollout_ratio"}  # larger where sampling is truncated


def healthy_range(metric: str, run: Run) -> HealthyRange | None:
    """The healthy range of a metric in this run; None without one, or where the run's settings change its meaning."""
    healthy = RANGES.get(metric)
    if healthy is None or not run.name.startswith(healthy.step):
        return None
    arguments = run.arguments
    if metric in UPDATE_METRICS and arguments.get("policy_loss") not in (None, "ppo_clip"):
        return None
    truncated = arguments.get("top_p", 1.0) != 1.0 or arguments.get("top_k", 0) != 0
    return None if metric in ROLLOUT_METRICS and truncated else healthy


def recent_mean(values: Sequence[float]) -> float:
    """Mean of the last LAST_SHARE of the values, at least of one."""
    count = max(1, round(LAST_SHARE * len(values)))
    return sum(values[-count:]) / count
