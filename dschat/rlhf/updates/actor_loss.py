"""The actor's loss of a micro-batch, as configured: weighted policy loss, KL term, entropy bonus."""

from __future__ import annotations

from torch import Tensor

from dschat.arguments import PPOArguments
from dschat.losses.aggregation import aggregation_weights
from dschat.losses.normalizer import Metrics
from dschat.losses.policy_table import POLICY_LOSSES
from dschat.losses.regularization import entropy_bonus, kl_loss
from dschat.rlhf.experience import Experience
from dschat.rlhf.updates.optimizer_steps import StepCounts
from dschat.rlhf.updates.rollout_correction import correction_weights


class ActorLoss:
    """(log-probs, entropies, micro-batch) → (loss, metrics), both divided by the counts of the whole step.

    Args:
        ppo: the choice of losses and their coefficients.
        max_tokens: maximum response length.

    Attributes:
        needs_entropy: whether calls need entropies with gradient.
    """

    def __init__(self, ppo: PPOArguments, *, max_tokens: int) -> None:
        self.ppo, self.max_tokens = ppo, max_tokens
        self.needs_entropy = ppo.entropy_coef > 0
        self.corrects_rollouts = ppo.rollout_correction != "none" and ppo.old_logprobs == "recompute"
        entry = POLICY_LOSSES[ppo.policy_loss]
        clip = {"clip_range": (ppo.clip_range_low, ppo.clip_range_high)} if entry.clip_range else {}
        self.policy_loss, self.options = entry.function, clip | entry.options(ppo)

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, micro_batch: Experience, counts: StepCounts, *, kl_coef: float
    ) -> tuple[Tensor, Metrics]:
        """The loss and its metrics; the metric "policy_loss" excludes KL and entropy.

        Args:
            logprobs, entropy: [B, T] of the current actor, with gradient.
            kl_coef: KL coefficient per nat, used with --kl_in loss.
        """
        ppo, mask, old_logprobs = self.ppo, micro_batch.trained_mask, micro_batch.old_logprobs
        if old_logprobs is None:  # the only update on this rollout: the policy is still the one that sampled
            old_logprobs = logprobs.detach()
        weights = aggregation_weights(
            mask, ppo.loss_aggregation, tokens=counts.tokens, sequences=counts.responses, max_tokens=self.max_tokens
        )
        corrected_weights, correction = weights, {}
        if self.corrects_rollouts:
            factors, correction = correction_weights(
                old_logprobs, micro_batch.rollout_logprobs, mask, correction=ppo.rollout_correction,
                cap=ppo.rollout_correction_cap, floor=ppo.rollout_correction_floor, normalizer=counts.tokens,
            )  # fmt: skip
            corrected_weights = weights * factors
        loss, metrics = self.policy_loss(
            logprobs, old_logprobs, micro_batch.advantages, mask, weights=corrected_weights,
            normalizer=counts.tokens, **self.options,
        )  # fmt: skip
        metrics = metrics | correction | {"policy_loss": loss.detach()}
        if ppo.kl_in == "loss" and micro_batch.ref_logprobs is not None:
            kl, kl_metrics = kl_loss(
                logprobs, micro_batch.ref_logprobs, mask, estimator=ppo.kl_estimator, clip=ppo.kl_clip or None,
                weights=weights, normalizer=counts.tokens,
            )  # fmt: skip
            loss, metrics = loss + kl_coef * kl, metrics | kl_metrics
        if self.needs_entropy:
            bonus, bonus_metrics = entropy_bonus(entropy, mask, weights=weights, normalizer=counts.tokens)
            loss, metrics = loss - ppo.entropy_coef * bonus, metrics | bonus_metrics
        return loss, metrics
