"""Score shaping: clipping, penalties for a missing EOS and for length; detection of groups with equal scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.rlhf.advantages import overlong_penalty

# A group whose scores differ by less counts as flat: its advantages would be rounding noise.
FLAT_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class ScoreShaping:
    """Clipping of scores, then penalties for a missing EOS and for length close to the limit.

    Attributes:
        reward_clip: scores are clipped to ± this; 0: no clipping.
        missing_eos_penalty: subtracted where a response did not end.
        overlong_buffer, overlong_factor: see overlong_penalty; a buffer of 0 disables it.
        max_tokens: maximum response length.
    """

    reward_clip: float
    missing_eos_penalty: float
    overlong_buffer: int
    overlong_factor: float
    max_tokens: int

    def shaped_scores(self, scores: Tensor, *, ended: Tensor, lengths: Tensor) -> Tensor:
        """[B] clipped scores minus penalties.

        Args:
            scores: [B] float.
            ended: [B] bool, True where the response ended by EOS.
            lengths: [B] long, tokens.
        """
        # Penalties come after clipping, else they have no effect on a score far beyond the clip.
        if self.reward_clip:
            scores = scores.clamp(-self.reward_clip, self.reward_clip)
        scores = scores - self.missing_eos_penalty * (~ended)
        if self.overlong_buffer:
            scores = scores + overlong_penalty(
                lengths, max_tokens=self.max_tokens, buffer=self.overlong_buffer, factor=self.overlong_factor
            )
        return scores


def flat_groups(scores: Tensor, has_score: Tensor, group_size: int) -> Tensor:
    """[B / group_size] bool, True where all scored responses to a prompt have the same score, or none has one.

    Args:
        scores: [B] float.
        has_score: [B] bool, True where there is a score.
    """
    highest = scores.masked_fill(~has_score, -torch.inf).view(-1, group_size).amax(dim=1)
    lowest = scores.masked_fill(~has_score, torch.inf).view(-1, group_size).amin(dim=1)
    return highest - lowest < FLAT_TOLERANCE  # −inf, hence flat, if no response has one
