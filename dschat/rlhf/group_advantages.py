"""Group-relative advantages over several responses to one prompt: pure functions of tensors.

Masks and shapes are those of dschat.rlhf.advantages. Rows k·n … k·n + n − 1 are the responses to one prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.rlhf.advantages import summed_rewards
from dschat.tensors import at_least_float32, require_mask

# Added to a group's standard deviation; far smaller than any real difference of scores.
GROUP_EPSILON = 1e-6


@torch.no_grad()
def grpo(rewards: Tensor, response_mask: Tensor, *, group_size: int, has_score: Tensor | None = None) -> Tensor:
    """Group-relative advantages: every token of response i gets (R_i − mean R) / (std R + 1e-6), over its group.

    The standard deviation is unbiased (÷ n − 1), as in OpenRLHF, verl and TRL; the paper does not specify it. ε is
    verl's (OpenRLHF 1e-9, TRL 1e-4); it only matters where rewards of a group are nearly equal. A KL penalty in
    `rewards` is part of R, so it enters the baseline (verl, TRL; OpenRLHF subtracts it per token afterwards).

    Args:
        rewards: [B, T] float, per token; R is their sum.
        response_mask: [B, T] bool, True on generated tokens.
        group_size: n ≥ 2; rows k·n … k·n + n − 1 are the responses to one prompt.
        has_score: [B] bool, False on responses without a score: they are excluded from their group's statistics, and a
            single remaining response has advantage 0. None: all have one.

    Returns:
        advantages: [B, T] float32 (float64 for float64), zero where the mask, or has_score, is False.

    Raises:
        ValueError: B is no multiple of group_size, or group_size < 2; shapes that differ, a mask that is not bool.

    Source: Shao et al. 2024, section 4.1.2 (arXiv:2402.03300).
    """
    groups, scored = _groups(rewards, response_mask, group_size, has_score)  # [B/n, n] each
    centred = _centred(groups, scored)
    degrees_of_freedom = (scored.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    deviation = (centred.square().sum(dim=1, keepdim=True) / degrees_of_freedom).sqrt()
    return _to_tokens(centred / (deviation + GROUP_EPSILON), rewards, response_mask)


@torch.no_grad()
def dr_grpo(rewards: Tensor, response_mask: Tensor, *, group_size: int, has_score: Tensor | None = None) -> Tensor:
    """GRPO without division by std: R_i − mean R over the group, so that easy and hard prompts weigh the same.

    Dr.GRPO's other change, token sums over a constant instead of means over each response's length, is the aggregation
    "seq_mean_token_sum_norm" (see losses.aggregation). Arguments, result and errors as in grpo.

    Source: Liu et al. 2025, section 3.2 (arXiv:2503.20783).
    """
    return _to_tokens(_centred(*_groups(rewards, response_mask, group_size, has_score)), rewards, response_mask)


@torch.no_grad()
def rloo(rewards: Tensor, response_mask: Tensor, *, group_size: int, has_score: Tensor | None = None) -> Tensor:
    """REINFORCE with a leave-one-out baseline: R_i minus the mean of the group's other rewards.

    A KL penalty in `rewards` enters the baseline, as in the paper (and TRL). Arguments, result and errors as in grpo.

    Source: Ahmadian et al. 2024, eq. 8 (arXiv:2402.14740); Kool et al. 2019.
    """
    groups, scored = _groups(rewards, response_mask, group_size, has_score)
    scored_count = scored.sum(dim=1, keepdim=True)
    # R_i − (ΣR − R_i) / (n − 1) = n / (n − 1) · (R_i − mean R)
    return _to_tokens(_centred(groups, scored) * scored_count / (scored_count - 1).clamp(min=1), rewards, response_mask)


@torch.no_grad()
def opo(rewards: Tensor, response_mask: Tensor, *, group_size: int, has_score: Tensor | None = None) -> Tensor:
    """Length-weighted baseline: R_i − Σ l_j R_j / Σ l_j, with l the length of a response in tokens.

    It minimises variance if token gradients are independent and of equal norm. Arguments, result and errors as in grpo.

    Source: Hao et al. 2025 (OPO), section 3 (arXiv:2505.23585).
    """
    groups, scored = _groups(rewards, response_mask, group_size, has_score)
    lengths = response_mask.sum(dim=-1).view_as(groups) * scored
    return _to_tokens((groups - _mean(groups, lengths)) * scored, rewards, response_mask)


@torch.no_grad()
def group_mean(rewards: Tensor, response_mask: Tensor, *, group_size: int, has_score: Tensor | None = None) -> Tensor:
    """[B]: mean over each response's group of the summed rewards. Arguments and errors as in grpo."""
    means = _mean(*_groups(rewards, response_mask, group_size, has_score)).squeeze(1)
    return means.to(at_least_float32(rewards).dtype).repeat_interleave(group_size)


def _groups(rewards: Tensor, response_mask: Tensor, group_size: int, has_score: Tensor | None) -> tuple[Tensor, Tensor]:
    """[B/n, n] float64: summed rewards of each group, and 1 where there is a score; both 0 where there is none.

    In float32 the mean of equal rewards has a rounding error, which grpo would divide by a std of the same size.
    """
    summed = summed_rewards(rewards, response_mask).double()
    has_score = torch.ones_like(summed, dtype=torch.bool) if has_score is None else has_score
    require_mask(has_score, rewards=summed)
    if group_size < 2 or len(summed) % group_size:
        raise ValueError(
            f"{len(summed)} responses in groups of {group_size}: a group compares at least 2 responses to one prompt, "
            "and no group may be incomplete."
        )
    return torch.where(has_score, summed, 0.0).view(-1, group_size), has_score.to(summed.dtype).view(-1, group_size)


def _mean(groups: Tensor, weights: Tensor) -> Tensor:
    """[B/n, 1]: weighted mean of each row with weights [B/n, n] ≥ 0; 0 where all weights are 0."""
    total = weights.sum(dim=1, keepdim=True)
    return (weights * groups).sum(dim=1, keepdim=True) / total.masked_fill(total == 0, 1)


def _centred(groups: Tensor, scored: Tensor) -> Tensor:
    """[B/n, n]: each reward minus the mean of its group; 0 where there is no score."""
    return (groups - _mean(groups, scored)) * scored


def _to_tokens(per_response: Tensor, rewards: Tensor, response_mask: Tensor) -> Tensor:
    """[B/n, n] → [B, T]: broadcast to every token of a response, in the dtype of the rewards."""
    return torch.where(response_mask, per_response.to(at_least_float32(rewards).dtype).reshape(-1, 1), 0.0)
