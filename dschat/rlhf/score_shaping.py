"""Score shaping: clipping, penalties for a missing EOS and for length; detection of groups with equal scores."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.rlhf.advantages import overlong_penalty

# Scores of a group that differ by less are treated as equal: their advantages would be rounding noise.
SPREAD = 1e-6


def shaped_scores(
    scores: Tensor, ended: Tensor, lengths: Tensor, *, reward_clip: float, missing_eos_penalty: float,
    overlong_buffer: int, overlong_factor: float, max_tokens: int,
) -> Tensor:  # fmt: skip
    """[B] clipped scores, minus the penalties for a missing EOS and for length close to the limit.

    Args:
        scores: [B] float.
        ended: [B] bool, True where the response ended by EOS.
        lengths: [B] long, tokens.
        reward_clip: scores are clipped to ± this; 0: no clipping.
        missing_eos_penalty: subtracted where a response did not end.
        overlong_buffer, overlong_factor: see overlong_penalty; a buffer of 0 disables it.
        max_tokens: maximum response length.
    """
    # Penalties come after clipping, else they have no effect on a score far beyond the clip.
    if reward_clip:
        scores = scores.clamp(-reward_clip, reward_clip)
    scores = scores - missing_eos_penalty * (~ended)
    if overlong_buffer:
        scores = scores + overlong_penalty(
            lengths, max_tokens=max_tokens, buffer=overlong_buffer, factor=overlong_factor
        )
    return scores


def flat_groups(scores: Tensor, has_score: Tensor, group_size: int) -> Tensor:
    """[B / group_size] bool, True where all scored responses to a prompt have the same score.

    Args:
        scores: [B] float.
        has_score: [B] bool, True where there is a score.
    """
    most = scores.masked_fill(~has_score, -torch.inf).view(-1, group_size).amax(dim=1)
    least = scores.masked_fill(~has_score, torch.inf).view(-1, group_size).amin(dim=1)
    return most - least < SPREAD  # −inf where there is no score
