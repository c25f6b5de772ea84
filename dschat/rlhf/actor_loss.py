"""The actor's loss of a micro-batch, as the flags put it together: policy loss, KL, entropy, each token weighed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.arguments import PPOArguments
from dschat.distributed.launch import sum_over_ranks
from dschat.losses.normalizer import Metrics
from dschat.losses.policy import policy_loss
from dschat.losses.policy_losses import aggregation_weights, cispo_loss, entropy_bonus, gspo_loss, kl_loss, sapo_loss
from dschat.rlhf.experience import Experience
from dschat.rlhf.rollout_correction import correction_weights

PolicyLoss = Callable[..., tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class StepCounts:
    """What an optimizer step learns from, over all ranks and micro-batches: tokens, and responses with such tokens."""

    tokens: float
    responses: float

    @classmethod
    def of(cls, minibatch: Experience) -> StepCounts:
        """A collective; every rank brings its rows of the step."""
        mask = minibatch.trained_mask
        tokens, responses = sum_over_ranks(torch.stack([mask.sum(), mask.any(-1).sum()])).tolist()
        return cls(float(tokens), float(responses))


class ActorLoss:
    """(log-probs, entropies, micro-batch) → (loss, metrics), both divided by the counts of the whole step.

    Args:
        ppo: which losses, how weighed.
        max_tokens: longest response that is possible.

    Attributes:
        wants_entropy: whether entropies with gradient have to be given.
    """

    def __init__(self, ppo: PPOArguments, *, max_tokens: int) -> None:
        self.ppo, self.max_tokens = ppo, max_tokens
        self.wants_entropy = ppo.entropy_coef > 0
        self.corrects_rollouts = ppo.rollout_correction != "none" and ppo.old_logprobs == "recompute"
        clip = {"clip_range": (ppo.clip_range_low, ppo.clip_range_high)}
        soft = {
            "positive_temperature": ppo.sapo_positive_temperature,
            "negative_temperature": ppo.sapo_negative_temperature,
        }
        choices: dict[str, tuple[PolicyLoss, dict]] = {
            "ppo_clip": (policy_loss, clip | {"dual_clip": ppo.dual_clip or None}),
            "gspo": (gspo_loss, clip),
            "cispo": (cispo_loss, clip),
            "sapo": (sapo_loss, soft),
        }
        self.policy_loss, self.settings = choices[ppo.policy_loss]

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, part: Experience, counts: StepCounts, *, kl_coef: float
    ) -> tuple[Tensor, Metrics]:
        """The loss, and its metrics: "policy_loss" is the first term alone.

        Args:
            logprobs, entropy: [B, T] of the actor as it is, with gradient.
            kl_coef: price of a nat, where it is paid in the loss.
        """
        ppo, mask = self.ppo, part.trained_mask
        weights = aggregation_weights(
            mask, ppo.loss_aggregation, tokens=counts.tokens, sequences=counts.responses, max_tokens=self.max_tokens
        )
        corrected, correction = weights, {}
        if self.corrects_rollouts:
            factors, correction = correction_weights(
                part.old_logprobs, part.rollout_logprobs, mask, correction=ppo.rollout_correction,
                cap=ppo.rollout_correction_cap, floor=ppo.rollout_correction_floor, normalizer=counts.tokens,
            )  # fmt: skip
            corrected = weights * factors
        loss, metrics = self.policy_loss(
            logprobs, part.old_logprobs, part.advantages, mask, weights=corrected, normalizer=counts.tokens,
            **self.settings,
        )  # fmt: skip
        metrics = metrics | correction | {"policy_loss": loss.detach()}
        if ppo.kl_in == "loss" and part.ref_logprobs is not None:
            kl, said = kl_loss(
                logprobs, part.ref_logprobs, mask, estimator=ppo.kl_estimator, clip=ppo.kl_clip or None,
                weights=weights, normalizer=counts.tokens,
            )  # fmt: skip
            loss, metrics = loss + kl_coef * kl, metrics | said
        if self.wants_entropy:
            bonus, said = entropy_bonus(entropy, mask, weights=weights, normalizer=counts.tokens)
            loss, metrics = loss - ppo.entropy_coef * bonus, metrics | said
        return loss, metrics
