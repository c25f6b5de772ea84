"""From scores to rewards and advantages, as --algorithm and its flags choose."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.arguments import PPOArguments
from dschat.rlhf import advantages as estimators
from dschat.rlhf import group_advantages
from dschat.rlhf.experience import Experience

# Scores of a group that differ by less are alike: nothing can be learnt from comparing them.
SPREAD = 1e-6
# Every token of a response gets the same number, made of the whole rewards of its group.
BY_GROUP = {
    "grpo": group_advantages.grpo,
    "dr_grpo": group_advantages.dr_grpo,
    "rloo": group_advantages.rloo,
    "opo": group_advantages.opo,
}


def shaped_scores(scores: Tensor, ended: Tensor, lengths: Tensor, *, ppo: PPOArguments, max_tokens: int) -> Tensor:
    """[B] what responses are worth: clipped scores, less what a missing EOS and the last tokens cost.

    Args:
        scores: [B] float.
        ended: [B] bool, True where the response ended by EOS.
        lengths: [B] long, tokens.
        max_tokens: longest response that is possible.
    """
    # Penalties come after clipping, or a score beyond the clip would swallow them.
    if ppo.reward_clip:
        scores = scores.clamp(-ppo.reward_clip, ppo.reward_clip)
    scores = scores - ppo.missing_eos_penalty * (~ended)
    if ppo.overlong_buffer:
        scores = scores + estimators.overlong_penalty(
            lengths, max_tokens=max_tokens, buffer=ppo.overlong_buffer, factor=ppo.overlong_factor
        )
    return scores


def estimate_advantages(
    experience: Experience, *, ppo: PPOArguments, greedy_scores: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Advantages [B, T], not whitened yet, and the critic's returns [B, T] (None without a critic).

    Args:
        experience: with rewards, and with values where there is a critic.
        greedy_scores: [B] what the greedy response to each row's prompt is worth, for remax.
    """
    rewards, mask = experience.rewards, experience.response_mask
    groups = {"group_size": ppo.num_samples_per_prompt, "known": experience.known}
    if ppo.algorithm == "ppo":
        return estimators.gae(rewards, experience.values, mask, gamma=ppo.gamma, gae_lambda=ppo.gae_lambda)
    if ppo.algorithm in BY_GROUP:
        return BY_GROUP[ppo.algorithm](rewards, mask, **groups), None
    baseline = {
        "reinforce++": lambda: None,
        "reinforce++_baseline": lambda: group_advantages.group_mean(rewards, mask, **groups),
        "remax": lambda: greedy_scores,
    }[ppo.algorithm]()
    return estimators.reinforce(rewards, mask, gamma=ppo.gamma, baseline=baseline), None


def flat_groups(scores: Tensor, known: Tensor, group_size: int) -> Tensor:
    """[B / group_size] bool, True where all responses to a prompt score alike, as far as is known.

    Args:
        scores: [B] float.
        known: [B] bool, True where there is a score.
    """
    most = scores.masked_fill(~known, -torch.inf).view(-1, group_size).amax(dim=1)
    least = scores.masked_fill(~known, torch.inf).view(-1, group_size).amin(dim=1)
    return most - least < SPREAD  # −inf where nothing is known
