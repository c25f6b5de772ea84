"""Supervised fine-tuning: negative log-likelihood of the trained tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.losses.normalizer import Metrics, Normalizer, count_of
from dschat.tensors import at_least_float32, require_mask


def sft_loss(logprobs: Tensor, loss_mask: Tensor, *, normalizer: Normalizer = None) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the trained tokens: −Σ logprob / normalizer.

    Args:
        logprobs: [B, S] float, log-prob of token i given the tokens before it.
        loss_mask: [B, S] bool, True on trained tokens (the closing EOS too).
        normalizer: trained tokens of the whole step (see dschat.losses.normalizer).

    Returns:
        loss: scalar.
        metrics: nll, the same number detached, nats per token; perplexity is exp of its sum over the step.

    Raises:
        ValueError: shapes that differ, a mask that is not bool, a normalizer out of range.
    """
    require_mask(loss_mask, logprobs=logprobs)
    loss = -torch.where(loss_mask, at_least_float32(logprobs), 0.0).sum() / count_of(loss_mask, normalizer)
    return loss, {"nll": loss.detach()}
