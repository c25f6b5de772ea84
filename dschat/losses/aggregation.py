"""Loss aggregation: token weights for the mean over tokens, over responses, or over a constant length."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.tensors import require_mask

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")


def aggregation_weights(
    response_mask: Tensor, aggregation: str, *, tokens: float, sequences: float, max_tokens: int
) -> Tensor:
    """Token weights w such that Σ w·ℓ / N is the chosen mean, for N tokens and Q responses in the step.

    "token_mean": 1, all tokens equal (DAPO). "seq_mean_token_mean": N / (Q·n_i), the mean over responses of the means
    over their n_i tokens (GRPO). "seq_mean_token_sum_norm": N / (Q·L), the mean over responses of token sums divided by
    a constant L, free of length bias (Dr.GRPO). Every loss is divided by N of the whole step, so that the result does
    not depend on how the step is split.

    Args:
        response_mask: [B, T] bool, True on tokens that count.
        tokens, sequences: N and Q, over all ranks and micro-batches; a response counts if one of its tokens does.
        max_tokens: L, the maximum response length.

    Returns:
        [B, T] float32, 0 where the mask is False.

    Raises:
        ValueError: an unknown aggregation, a mask that is not bool.

    Source: Yu et al. 2025 (DAPO), eq. 12 (arXiv:2503.14476); Shao et al. 2024, eq. 3 (arXiv:2402.03300); Liu et al.
        2025 (Dr.GRPO), section 3.2 (arXiv:2503.20783).
    """
    require_mask(response_mask)
    if aggregation == "token_mean":
        per_response = torch.ones(len(response_mask), device=response_mask.device)
    elif aggregation == "seq_mean_token_mean":
        per_response = tokens / (max(sequences, 1.0) * response_mask.sum(-1).clamp(min=1))
    elif aggregation == "seq_mean_token_sum_norm":
        per_response = torch.full((len(response_mask),), tokens / (max(sequences, 1.0) * max_tokens))
    else:
        raise ValueError(f'aggregation "{aggregation}" is unknown: choose one of {", ".join(AGGREGATIONS)}.')
    return torch.where(response_mask, per_response.float().to(response_mask.device).unsqueeze(-1), 0.0)
