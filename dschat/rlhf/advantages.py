"""Token rewards, KL estimates, advantages and returns: pure functions of tensors.

[B, T] tensors are indexed by response token. response_mask is bool, True on generated tokens (the final EOS too); it
may have holes (text that the model did not generate). Values at False positions, NaN included, are ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.tensors import LOG_RATIO_LIMIT, at_least_float32, require_mask

KL_ESTIMATORS = ("k1", "k2", "k3", "k3+")


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: str, *, response_mask: Tensor | None = None,
    clip: float | None = None,
) -> Tensor:  # fmt: skip
    """Per-token estimate of KL(π_actor ‖ π_ref) from tokens that π_actor sampled.

    With Δ = logprob − ref_logprob: k1 = Δ (unbiased), k2 = Δ²/2 (biased, low variance),
    k3 = e^(−Δ) − 1 + Δ (unbiased, never negative; its −Δ is clamped to ±20 in the exponential), k3+ = the value of k3
    with the gradient of k2, which is unbiased: E[Δ·∇logπ] = ∇KL, while that of k1 is 0 on average and that of k3 is
    ∇KL(π_ref ‖ π_actor), the reverse divergence.

    k3 grows like e^(−Δ): at Δ = −10 a token's estimate is 22,015 nats, at −20 it is 4.9e8, so a single token dominates
    the mean and the gradient of its step. `clip` bounds it, at the cost of bias where it applies.

    Args:
        logprobs, ref_logprobs: [B, T] float, in nats. Gradient flows into both.
        estimator: "k1", "k2", "k3" or "k3+".
        response_mask: [B, T] bool, True where the estimate counts. Required for gradients if other positions may be
            NaN or inf.
        clip: > 0, nats: an estimate of k3 is at most this and has no gradient beyond it (10 in verl); k3+ keeps the
            gradient of k2. None disables it. k1 and k2 grow slowly and are never clipped.

    Returns:
        [B, T] float32 (float64 for float64), in nats; 0 where response_mask is given and False.

    Raises:
        ValueError: unknown estimator; shapes that differ; a mask that is not bool; a clip that is not positive.

    Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html; gradients: Tang and
        Munos 2025 (arXiv:2506.09477), section 4.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"logprobs has shape {tuple(logprobs.shape)}, but ref_logprobs {tuple(ref_logprobs.shape)}: "
            "KL compares the same tokens, so pass log-probs of the same responses."
        )
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip} nats, but it is an upper bound of KL, so it must be > 0; None disables it.")
    delta = at_least_float32(logprobs) - at_least_float32(ref_logprobs)
    if response_mask is not None:
        require_mask(response_mask, logprobs=logprobs)
        delta = torch.where(response_mask, delta, 0.0)
    if estimator == "k1":
        return delta
    if estimator == "k2":
        return delta.square() / 2
    if estimator in ("k3", "k3+"):
        # expm1 keeps the digits of small Δ, where e^(−Δ) − 1 + Δ would round to noise.
        k3 = torch.expm1((-delta).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) + delta
        k3 = k3 if clip is None else k3.clamp(max=clip)  # k3 >= 0 needs no lower bound
        if estimator == "k3":
            return k3
        k2 = delta.square() / 2
        return k3.detach() + (k2 - k2.detach())
    raise ValueError(f'kl estimator "{estimator}" is unknown: choose one of {", ".join(KL_ESTIMATORS)}.')


@torch.no_grad()
def token_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """Reward of each response token: −kl_coef · kl everywhere, plus the score at the last response token.

    Args:
        scores: [B] float, score of each whole response. The score of a row with an empty response is dropped, as it
            has no token to receive it.
        kl: [B, T] float, in nats.
        response_mask: [B, T] bool, True on generated tokens.
        kl_coef: reward per nat of KL.

    Returns:
        [B, T] float32 (float64 for float64), no graph, zero where response_mask is False.

    Raises:
        ValueError: shapes that do not fit, a mask that is not bool.

    Source: Ziegler et al. 2019, eq. 2 (arXiv:1909.08593), with the KL spread over the tokens.
    """
    require_mask(response_mask, kl=kl)
    if scores.shape != response_mask.shape[:1]:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}, but response_mask {tuple(response_mask.shape)} requires "
            f"({response_mask.shape[0]},): one score per whole response."
        )
    last = response_mask & (tokens_after(response_mask) == 0)  # [B, T]
    penalty = torch.where(response_mask, -kl_coef * at_least_float32(kl), 0.0)
    return penalty + torch.where(last, at_least_float32(scores).unsqueeze(-1), 0.0)


def tokens_after(response_mask: Tensor) -> Tensor:
    """[B, T] long: number of response tokens after each response token; undefined where the mask is False."""
    return response_mask.long().flip(-1).cumsum(-1).flip(-1) - 1


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over response tokens.

    δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γ·λ·A_{t+1},  return_t = A_t + V_t; value and advantage after the last
    response token are 0. Masked positions are skipped, so a row with holes has the result of its compacted row.

    Args:
        rewards: [B, T] float, KL penalty included.
        values: [B, T] float, V of the state before each response token.
        response_mask: [B, T] bool, True on generated tokens (the final EOS too).
        gamma: discount γ per token, in [0, 1].
        gae_lambda: λ in [0, 1]; 0 is the one-step TD error, 1 the discounted return minus V.

    Returns:
        advantages, returns: [B, T] float32 (float64 for float64), no graph, zero where the mask is False.

    Raises:
        ValueError: shapes that differ, a mask that is not bool, γ or λ outside [0, 1].

    Source: Schulman et al. 2016, eq. 16 (arXiv:1506.02438).
    """
    require_mask(response_mask, rewards=rewards, values=values)
    for name, value in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}, but it is a discount, so it must lie in [0, 1]: try 0.95 or 1.0.")
    rewards, values = at_least_float32(rewards), at_least_float32(values)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])  # [B]
    for t in reversed(range(values.shape[1])):
        in_response = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(in_response, delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(in_response, values[:, t], next_value)
        advantages[:, t] = torch.where(in_response, next_advantage, 0.0)
    return advantages, torch.where(response_mask, advantages + values, 0.0)


@torch.no_grad()
def returns_to_go(rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + γ·G_{t+1}, the discounted sum of the rewards from each response token on.

    Args:
        rewards: [B, T] float.
        response_mask: [B, T] bool, True on generated tokens; other positions are skipped.
        gamma: discount γ per token, in [0, 1].

    Returns:
        [B, T] float32 (float64 for float64), zero where response_mask is False.
    """
    # With V = 0 and λ = 1 the advantage is the return.
    return gae(rewards, torch.zeros_like(rewards), response_mask, gamma=gamma, gae_lambda=1.0)[0]


def summed_rewards(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """[B]: undiscounted sum of each response's token rewards, KL penalty included if the rewards contain it."""
    require_mask(response_mask, rewards=rewards)
    return torch.where(response_mask, at_least_float32(rewards), 0.0).sum(-1)


@torch.no_grad()
def reinforce(rewards: Tensor, response_mask: Tensor, *, gamma: float, baseline: Tensor | None = None) -> Tensor:
    """Discounted return of each token, with a baseline subtracted from the score.

    A baseline b is in units of the score R, which is the reward of the last token n − 1, so it is subtracted there and
    discounted like the score: with r'_{n−1} = r_{n−1} − b, and r'_k = r_k before it,

        A_t = Σ_{k≥t} γ^(k−t)·r'_k = G_t − γ^(n−1−t)·b.

    A response whose score equals its baseline has no advantage at any token, whatever γ is, and one with a better score
    has a positive one everywhere; with G_t − b the early tokens of every long response would be pushed down. At γ = 1
    both are the same. At γ < 1 the discount depends on the response's own length n, so b is an offset of the score (as
    in OpenRLHF), not a function of the state alone: short good responses and long bad ones are favoured.

    REINFORCE++ is this without a baseline, whitened over the whole rollout batch; its variant subtracts group_mean and
    is then whitened; ReMax subtracts the greedy response's score. (MiniDataset whitens, as that needs all ranks.)

    Args:
        rewards: [B, T] float, per token.
        response_mask: [B, T] bool, True on generated tokens.
        gamma: discount γ per token, in [0, 1].
        baseline: [B] float, in units of the score; None is 0.

    Returns:
        advantages: [B, T] float32 (float64 for float64), zero where the mask is False.

    Raises:
        ValueError: shapes that differ, a mask that is not bool, γ outside [0, 1].

    Source: REINFORCE++: Hu et al. 2025, section 3 (arXiv:2501.03262); ReMax: Li et al. 2023, algorithm 1
        (arXiv:2310.10505).
    """
    returns = returns_to_go(rewards, response_mask, gamma=gamma)
    if baseline is None:
        return returns
    if baseline.shape != rewards.shape[:1]:
        raise ValueError(f"baseline has shape {tuple(baseline.shape)}, but it is one number per response, [B].")
    discounts = gamma ** tokens_after(response_mask).to(returns.dtype)  # [B, T]; 0⁰ is 1
    return torch.where(response_mask, returns - discounts * at_least_float32(baseline).unsqueeze(-1), 0.0)


@torch.no_grad()
def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int, factor: float) -> Tensor:
    """Soft overlong penalty: −factor · min(l − (L − B), B) / B where l > L − B, else 0.

    Args:
        lengths: [B] long, tokens of each response.
        max_tokens: L, the maximum response length.
        buffer: B, 1 ≤ B ≤ L: the penalty grows linearly over the last B tokens.
        factor: the penalty of a response of L tokens.

    Returns:
        [B] float32, ≤ 0.

    Raises:
        ValueError: a buffer outside [1, L].

    Source: Yu et al. 2025 (DAPO), eq. 13 (arXiv:2503.14476).
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(f"buffer={buffer}: must be the number of penalised tokens at the end, 1 to {max_tokens}.")
    over = (lengths - (max_tokens - buffer)).clamp(0, buffer)
    return -factor * over.float() / buffer


def adapted_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: float, responses: int) -> float:
    """The next KL coefficient: β·(1 + clip(KL / target − 1, ±0.2) · min(responses / horizon, 1)).

    The factor is capped at 1: an iteration of far more responses than the horizon could otherwise make β negative.

    Args:
        kl_coef: β of the iteration that `kl` was measured in.
        kl: its KL, nats per response.
        target: target KL, nats per response, > 0.
        horizon: number of responses over which β may change by about a fifth, > 0.
        responses: responses of the iteration, over all ranks.

    Source: Ziegler et al. 2019, section 2.2 (arXiv:1909.08593), in the form of its code, which counts responses.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * min(responses / horizon, 1.0))
