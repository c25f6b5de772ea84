"""Regularisation terms of the policy update: KL to the reference model, and the entropy bonus."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.losses.normalizer import Metrics, Normalizer, count_of
from dschat.rlhf.advantages import kl_estimate
from dschat.tensors import at_least_float32, require_mask


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    estimator: str,
    clip: float | None = None,
    weights: Tensor | None = None,
    normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:
    """KL to the reference model as a loss: Σ w·kl / normalizer, see advantages.kl_estimate.

    Tokens were sampled by the policy at experience time; the gradient is not importance-corrected for later updates,
    as in GRPO. estimator, clip: those of kl_estimate.

    Returns:
        loss: scalar, nats; only logprobs receives a gradient.
        metrics: kl_loss (unweighted mean over tokens).
    """
    kl = kl_estimate(logprobs, ref_logprobs.detach(), estimator, response_mask=response_mask, clip=clip)
    return _weighted(kl, response_mask, "kl_loss", weights, normalizer)


def entropy_bonus(
    entropy: Tensor, response_mask: Tensor, *, weights: Tensor | None = None, normalizer: Normalizer = None
) -> tuple[Tensor, Metrics]:
    """Mean entropy of the policy's token distributions, to be maximised: Σ w·H / normalizer.

    Args:
        entropy: [B, T] float, nats, with gradient.

    Returns:
        bonus: scalar, nats.
        metrics: entropy_bonus (unweighted mean over tokens).

    Source: Schulman et al. 2017, eq. 9 (arXiv:1707.06347).
    """
    return _weighted(entropy, response_mask, "entropy_bonus", weights, normalizer)


def _weighted(
    values: Tensor, response_mask: Tensor, name: str, weights: Tensor | None, normalizer: Normalizer
) -> tuple[Tensor, Metrics]:
    require_mask(response_mask, values=values)
    count = count_of(response_mask, normalizer)
    masked = torch.where(response_mask, at_least_float32(values), 0.0)
    weighted = masked if weights is None else masked * weights
    return weighted.sum() / count, {name: masked.detach().sum() / count}
