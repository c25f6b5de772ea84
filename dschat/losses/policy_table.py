"""The table of --policy_loss: function, default clip range and options of each policy loss.

Flags read it, so torch is imported only when a loss is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dschat.lazy_imports import LazyFunctions

if TYPE_CHECKING:
    from torch import Tensor

    from dschat.losses.normalizer import Metrics

policy = LazyFunctions("dschat.losses.policy")


@dataclass(frozen=True)
class PolicyLoss:
    """A row of the table of --policy_loss.

    Attributes:
        function: takes policy_loss's arguments up to response_mask, plus weights and normalizer.
        clip_range: default (low, high); None: the loss does not clip and has no clip_range argument.
        options: step 3's algorithm flags (PPOArguments) → further keyword arguments of the function.
    """

    function: Callable[..., tuple[Tensor, Metrics]]
    clip_range: tuple[float, float] | None
    options: Callable[[Any], dict[str, Any]] = lambda flags: {}


POLICY_LOSSES = {
    "ppo_clip": PolicyLoss(policy.policy_loss, (0.2, 0.2), lambda flags: {"dual_clip": flags.dual_clip or None}),
    "gspo": PolicyLoss(policy.gspo_loss, (3e-4, 4e-4)),
    "cispo": PolicyLoss(policy.cispo_loss, (1.0, 4.0)),
    "sapo": PolicyLoss(
        policy.sapo_loss, None,
        lambda flags: {
            "positive_temperature": flags.sapo_positive_temperature,
            "negative_temperature": flags.sapo_negative_temperature,
        },
    ),
}  # fmt: skip
