"""KTO: preference optimisation on single responses with a label. The normaliser counts rows."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.losses.normalizer import Metrics, Normalizer
from dschat.losses.preference import check_beta, row_count
from dschat.tensors import at_least_float32, require_mask


def kto_loss(
    logprobs: Tensor, ref_logprobs: Tensor, desirable: Tensor, *, kl: Tensor, beta: float,
    desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
    desirable_share: float | Tensor | None = None, normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """λ_d·(1 − σ(β·(r − kl))) for desirable responses, λ_u·(1 − σ(β·(kl − r))) for others; r = logprob − ref_logprob.

    Args:
        logprobs, ref_logprobs: [B] float, of single responses; the first receives a gradient.
        desirable: [B] bool.
        kl: scalar ≥ 0 in nats, of kto_kl over the whole step; no gradient goes through it.
        desirable_weight, undesirable_weight: λ_d, λ_u ≥ 0; the paper recommends λ_d·n_d / (λ_u·n_u) in [1, 1.5].
        desirable_share: fraction of desirable rows in the whole step; None: in this batch.

    Returns:
        loss: scalar.
        metrics: rewards/chosen, rewards/rejected (means of β·r over the desirable and the undesirable rows),
            rewards/margins (their difference), rewards/accuracies (share of rows with r on the correct side of kl, a
            tie counts half), logps/chosen, logps/rejected. kl is computed once per step, so the caller reports it.

    Source: Ethayarajh et al. 2024, eq. 8 (arXiv:2402.01306).
    """
    require_mask(desirable, logprobs=logprobs, ref_logprobs=ref_logprobs)
    check_beta(beta)
    count = row_count(logprobs, normalizer)
    logprobs = at_least_float32(logprobs)
    ratio = logprobs - ref_logprobs.detach()
    sign = torch.where(desirable, 1.0, -1.0)
    signed_margin = sign * (ratio - kl.detach())  # > 0: on the correct side of the reference point
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    loss = (weights * (1 - torch.sigmoid(beta * signed_margin))).sum() / count
    with torch.no_grad():
        share = desirable.double().mean() if desirable_share is None else torch.as_tensor(desirable_share)
        reward = [torch.where(d, beta * ratio, 0.0).sum() / count for d in (desirable, ~desirable)]
        logprob = [torch.where(d, logprobs, 0.0).sum() / count for d in (desirable, ~desirable)]
        d_share, u_share = (torch.where(s > 0, s, 1.0) for s in (share, 1 - share))
        metrics = {
            "rewards/chosen": reward[0] / d_share,
            "rewards/rejected": reward[1] / u_share,
            "rewards/margins": reward[0] / d_share - reward[1] / u_share,
            "rewards/accuracies": torch.heaviside(signed_margin, signed_margin.new_tensor(0.5)).sum() / count,
            "logps/chosen": logprob[0] / d_share,
            "logps/rejected": logprob[1] / u_share,
        }
    return loss, metrics


def kto_kl(log_ratio_sum: Tensor, count: Tensor) -> Tensor:
    """KTO's reference point: max(0, mean of log π − log π_ref over responses to other prompts), in nats.

    Args:
        log_ratio_sum, count: scalars, sums over the mismatched rows of the whole step: all ranks, all micro-batches.
            (A mean over a micro-batch, as in other systems, would depend on how the step is split.)

    Source: Ethayarajh et al. 2024, section 4.1 (arXiv:2402.01306).
    """
    return (log_ratio_sum / count.clamp(min=1)).clamp(min=0)
