"""The table of --algorithm in step 3: advantage estimator, requirements and defaults of each algorithm.

To add one, write an estimator (in advantages.py or group_advantages.py), its row here, a test, and a line in step 3's
README.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dschat.lazy_imports import LazyFunctions

if TYPE_CHECKING:
    from torch import Tensor

    Estimates = tuple[Tensor, Tensor | None]

# Flags read the table: torch is imported when an estimator is first called.
advantages = LazyFunctions("dschat.rlhf.advantages")
groups = LazyFunctions("dschat.rlhf.group_advantages")


@dataclass(frozen=True, kw_only=True)
class EstimatorInputs:
    """Inputs of advantage estimators; B responses of at most T tokens.

    Attributes:
        rewards: [B, T], the KL penalty included.
        response_mask: [B, T] bool.
        values: [B, T] of the critic, or None.
        has_score: [B] bool, False for responses without a score.
        greedy_scores: [B] of the greedy response to each row's prompt, for algorithms with a greedy baseline.
        group_size: responses per prompt, in consecutive rows.
        gamma, gae_lambda: see advantages.gae.
    """

    rewards: Tensor
    response_mask: Tensor
    values: Tensor | None
    has_score: Tensor
    greedy_scores: Tensor | None
    group_size: int
    gamma: float
    gae_lambda: float


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A row of the table of --algorithm.

    Attributes:
        estimate: inputs → advantages [B, T], not whitened yet, and the critic's returns [B, T] (None without a critic).
        trains_critic: whether there is a critic, whose values the estimator uses.
        compares_group: whether responses to one prompt are compared, so that at least two are needed.
        greedy_baseline: whether the greedy response to each prompt is scored as well.
        discounts: whether --gamma has an effect.
        defaults: values of flags not set by the user. KL coefficients are the papers', where they give one.
    """

    estimate: Callable[[EstimatorInputs], Estimates]
    trains_critic: bool = False
    compares_group: bool = False
    greedy_baseline: bool = False
    discounts: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _by_group(estimator: Callable[..., Tensor]) -> Callable[[EstimatorInputs], Estimates]:
    return lambda x: (estimator(x.rewards, x.response_mask, group_size=x.group_size, has_score=x.has_score), None)


def _reinforce(baseline: Callable[[EstimatorInputs], Tensor | None]) -> Callable[[EstimatorInputs], Estimates]:
    return lambda x: (advantages.reinforce(x.rewards, x.response_mask, gamma=x.gamma, baseline=baseline(x)), None)


ALGORITHMS = {
    "ppo": Algorithm(
        estimate=lambda x: advantages.gae(x.rewards, x.values, x.response_mask, gamma=x.gamma, gae_lambda=x.gae_lambda),
        trains_critic=True, discounts=True, defaults={"kl_coef": 0.1, "whiten_advantages": True},
    ),
    "grpo": Algorithm(
        estimate=_by_group(groups.grpo), compares_group=True,
        defaults={"kl_coef": 0.04, "kl_in": "loss", "kl_estimator": "k3", "loss_aggregation": "seq_mean_token_mean",
                  "num_samples_per_prompt": 8},
    ),
    "dr_grpo": Algorithm(
        estimate=_by_group(groups.dr_grpo), compares_group=True,
        defaults={"kl_in": "loss", "kl_estimator": "k3", "loss_aggregation": "seq_mean_token_sum_norm",
                  "num_samples_per_prompt": 8},
    ),
    "rloo": Algorithm(
        estimate=_by_group(groups.rloo), compares_group=True, defaults={"kl_coef": 0.05, "num_samples_per_prompt": 4}
    ),
    "reinforce++": Algorithm(
        estimate=_reinforce(lambda x: None), discounts=True, defaults={"kl_coef": 0.01, "whiten_advantages": True}
    ),
    "reinforce++_baseline": Algorithm(
        estimate=_reinforce(
            lambda x: groups.group_mean(x.rewards, x.response_mask, group_size=x.group_size, has_score=x.has_score)
        ),
        compares_group=True, discounts=True,
        defaults={"kl_coef": 0.01, "kl_in": "loss", "kl_estimator": "k2", "whiten_advantages": True,
                  "num_samples_per_prompt": 8},
    ),
    "remax": Algorithm(
        estimate=_reinforce(lambda x: x.greedy_scores), greedy_baseline=True, discounts=True,
        defaults={"kl_coef": 0.05},
    ),
    "opo": Algorithm(estimate=_by_group(groups.opo), compares_group=True, defaults={"num_samples_per_prompt": 8}),
}  # fmt: skip
# Defaults of the flags that a row does not set.
DEFAULTS: dict[str, Any] = {
    "kl_coef": 0.0, "kl_in": "reward", "kl_estimator": "k1", "loss_aggregation": "token_mean",
    "whiten_advantages": False, "num_samples_per_prompt": 1,
}  # fmt: skip
