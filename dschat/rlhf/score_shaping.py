"""From the scores of responses to what is maximised: clipping, penalties of length; and groups without a spread."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.rlhf.advantages import overlong_penalty

# Scores of a group that differ by less are alike: nothing can be learnt from comparing them.
SPREAD = 1e-6


def shaped_scores(
    scores: Tensor, ended: Tensor, lengths: Tensor, *, reward_clip: float, missing_eos_penalty: float,
    overlong_buffer: int, overlong_factor: float, max_tokens: int,
) -> Tensor:  # fmt: skip
    """[B] clipped scores, less the penalties of a missing EOS and of the last tokens before the length limit.

    Args:
        scores: [B] float.
        ended: [B] bool, True where the response ended by EOS.
        lengths: [B] long, tokens.
        reward_clip: scores are clipped to ± this; 0: not.
        missing_eos_penalty: subtracted where a response did not end.
        overlong_buffer, overlong_factor: see overlong_penalty; 0 tokens: none.
        max_tokens: longest response that is possible.
    """
    # Penalties come after clipping, or a score beyond the clip would swallow them.
    if reward_clip:
        scores = scores.clamp(-reward_clip, reward_clip)
    scores = scores - missing_eos_penalty * (~ended)
    if overlong_buffer:
        scores = scores + overlong_penalty(
            lengths, max_tokens=max_tokens, buffer=overlong_buffer, factor=overlong_factor
        )
    return scores


def flat_groups(scores: Tensor, has_score: Tensor, group_size: int) -> Tensor:
    """[B / group_size] bool, True where all responses to a prompt score alike among those with a score.

    Args:
        scores: [B] float.
        has_score: [B] bool, True where there is a score.
    """
    most = scores.masked_fill(~has_score, -torch.inf).view(-1, group_size).amax(dim=1)
    least = scores.masked_fill(~has_score, torch.inf).view(-1, group_size).amin(dim=1)
    return most - least < SPREAD  # −inf where there is no score
