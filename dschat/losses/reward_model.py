"""Reward models: the pairwise (Bradley-Terry) loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat.losses.normalizer import Metrics, Normalizer, count_of
from dschat.tensors import at_least_float32


def pairwise_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    margin: Tensor | None = None,
    centering_coef: float = 0.0,
    normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:
    """Bradley–Terry loss of a reward model: Σ (−log σ(c − r − margin) + coef·(c + r)²) / normalizer.

    Args:
        chosen_scores, rejected_scores: [B] float, one score per sequence, at its last real token.
        margin: [B] float, how much better the chosen one is, in units of score; None is 0.
        centering_coef: weight of the term that centres scores at 0, an offset that pairs do not determine.
        normalizer: pairs of the whole step (see dschat.losses.normalizer).

    Returns:
        loss: scalar.
        metrics: accuracy (share of pairs with c > r; margin is ignored, a tie counts as wrong), chosen_score,
            rejected_score, margin (mean c − r).

    Raises:
        ValueError: shapes that differ, a normalizer out of range.

    Source: Ouyang et al. 2022, eq. 1 (arXiv:2203.02155); margin: Touvron et al. 2023, eq. 2 (arXiv:2307.09288);
        centring: Eisenstein et al. 2023 (arXiv:2312.09244).
    """
    pairs = {"chosen_scores": chosen_scores, "rejected_scores": rejected_scores}
    if margin is not None:
        pairs["margin"] = margin
    if chosen_scores.dim() != 1 or len({x.shape for x in pairs.values()}) != 1:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in pairs.items())
        raise ValueError(f"{shapes}: all must be [B], one number per pair: read scores at their last real token first.")
    count = count_of(torch.ones_like(chosen_scores, dtype=torch.bool), normalizer)
    chosen, rejected = at_least_float32(chosen_scores), at_least_float32(rejected_scores)
    difference = chosen - rejected if margin is None else chosen - rejected - at_least_float32(margin)
    loss = (-F.logsigmoid(difference) + centering_coef * (chosen + rejected).square()).sum() / count
    with torch.no_grad():
        metrics = {
            "accuracy": (chosen > rejected).sum() / count,
            "chosen_score": chosen.sum() / count,
            "rejected_score": rejected.sum() / count,
            "margin": (chosen - rejected).sum() / count,
        }
    return loss, metrics
