"""Importance weights that correct for the difference between the rollout engine's policy and the trained one."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.losses.normalizer import Metrics, Normalizer, count_of
from dschat.rlhf.rollouts.logprob_mismatch import log_ratio
from dschat.tensors import LOG_RATIO_LIMIT

CORRECTIONS = ("tis", "mis", "seq_tis", "seq_mis")


def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    correction: str,
    cap: float,
    floor: float = 0.0,
    normalizer: Normalizer = None,
) -> tuple[Tensor, Metrics]:
    """Bounded importance weights of tokens that another policy sampled, w = π_old / π_rollout.

    "tis" truncates each token's weight to at most cap; "mis" masks tokens whose weight is outside [floor, cap] and
    keeps the other weights. "seq_tis" and "seq_mis" do the same with the weight of the whole response, the product
    over its tokens, applied to every token: unbiased where the bounds do not apply, but with a variance that grows
    with length.

    Args:
        old_logprobs: [B, T] float, of the target policy.
        rollout_logprobs: [B, T] float, of the sampling policy.
        response_mask: [B, T] bool, True on generated tokens.
        correction: one of CORRECTIONS.
        cap: > 0; bounds the variance at the cost of bias. 2 in verl.
        floor: in [0, cap); used by "mis" and "seq_mis" only. 0.5 in OpenRLHF.
        normalizer: response tokens of the whole step (see dschat.losses.normalizer); None: those of this batch.

    Returns:
        weights: [B, T] float32 without gradient, 0 where the mask is False.
        metrics: correction_weight (mean w), correction_cut (share of tokens that the bounds changed).

    Raises:
        ValueError: shapes that differ, a mask that is not bool, an unknown correction, bounds out of range.

    Source: Ionides 2008, Truncated Importance Sampling (J. Comput. Graph. Stat. 17:2); per token, between decoder and
        trainer: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training
        (fengyao.notion.site/off-policy-rl); masks and whole responses: Liu et al. 2025, When Speed Kills Stability
        (richardli.xyz/rl-collapse).
    """
    if correction not in CORRECTIONS:
        raise ValueError(f'correction "{correction}" is unknown: choose one of {", ".join(CORRECTIONS)}.')
    masking = correction.endswith("mis")
    if not cap > 0 or (masking and not 0 <= floor < cap):
        raise ValueError(f"floor is {floor} and cap {cap}, but weights need 0 <= floor < cap: a cap of 2 is usual.")
    delta = log_ratio(old_logprobs, rollout_logprobs, response_mask)  # [B, T]
    if correction.startswith("seq"):
        delta = delta.sum(-1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expand_as(delta)
    ratio = delta.exp()
    out_of_bounds = ratio > cap
    if masking:
        out_of_bounds = out_of_bounds | (ratio < floor)
        weights = torch.where(out_of_bounds, 0.0, ratio)
    else:
        weights = ratio.clamp(max=cap)
    weights = torch.where(response_mask, weights, 0.0)
    count = count_of(response_mask, normalizer)
    cut = response_mask & out_of_bounds
    return weights, {"correction_weight": weights.sum() / count, "correction_cut": cut.sum() / count}
