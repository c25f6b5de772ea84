"""Reference implementation of the other algorithms in plain torch and transformers: one unpadded row at a time.

Settings are a dict with the flag names; rows and forward passes are those of plain_ppo. Does not import dschat.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from plain_ppo import Row, logprobs, score
from torch import Tensor
from transformers import PreTrainedModel

Settings = dict[str, Any]


def kl_estimate(new: Tensor, ref: Tensor, s: Settings) -> Tensor:
    delta, estimator = new - ref, s["kl_estimator"]
    k3 = torch.exp(-delta) - 1 + delta
    if s.get("kl_clip"):
        k3 = torch.where(k3 > s["kl_clip"], s["kl_clip"], k3)
    if estimator == "k3+":
        return (delta**2 / 2) - (delta**2 / 2).detach() + k3.detach()
    return {"k1": delta, "k2": delta**2 / 2, "k3": k3}[estimator]


@torch.no_grad()
def greedy_response(actor: PreTrainedModel, prompt: Tensor, stop: list[int], max_new_tokens: int) -> Row:
    ids = prompt
    for _ in range(max_new_tokens):
        ids = torch.cat([ids, actor(ids[None]).logits[0, -1].argmax()[None]])
        if int(ids[-1]) in stop:
            return Row(prompt, ids[len(prompt) :], True)
    return Row(prompt, ids[len(prompt) :], False)


@torch.no_grad()
def shaped_score(row: Row, reward: PreTrainedModel, s: Settings) -> float:
    value = float(score(reward, torch.cat([row.prompt, row.response]))[0])
    value = max(-s["reward_clip"], min(s["reward_clip"], value))
    value -= 0 if row.ended else s["missing_eos_penalty"]
    unpenalised_length = s["max_answer_seq_len"] - s.get("overlong_buffer", 0)
    if len(row.response) > unpenalised_length:
        value -= s["overlong_factor"] * (len(row.response) - unpenalised_length) / s["overlong_buffer"]
    return value


@torch.no_grad()
def experience(rows: list[Row], actor: PreTrainedModel, ref: PreTrainedModel, reward: PreTrainedModel,
               stop: list[int], s: Settings) -> None:  # fmt: skip
    """Fill `expected` of every row, advantages not whitened; rows of a group follow each other."""
    for row in rows:
        old, entropy = logprobs(actor, row, s["temperature"])
        ref_logprobs, _ = logprobs(ref, row, s["temperature"])
        kl = kl_estimate(old, ref_logprobs, s)
        rewards = -s["kl_coef"] * kl if s["kl_in"] == "reward" else torch.zeros_like(kl)
        rewards[-1] += shaped_score(row, reward, s)
        row.expected = {"old_logprobs": old, "ref_logprobs": ref_logprobs, "entropy": entropy, "kl": kl,
                     "rewards": rewards}  # fmt: skip
    n = s["num_samples_per_prompt"]
    for first in range(0, len(rows), n):
        group = rows[first : first + n]
        totals = [float(row.expected["rewards"].sum()) for row in group]
        for i, row in enumerate(group):
            row.expected["advantages"] = _advantages(i, row, group, totals, actor, reward, stop, s)


def _advantages(i: int, row: Row, group: list[Row], totals: list[float], actor: PreTrainedModel,
                reward: PreTrainedModel, stop: list[int], s: Settings) -> Tensor:  # fmt: skip
    algorithm, n = s["algorithm"], len(group)
    mean = sum(totals) / n
    rewards, length = row.expected["rewards"], len(row.response)
    if algorithm in ("reinforce++", "reinforce++_baseline", "remax"):
        baseline = mean if algorithm == "reinforce++_baseline" else 0.0
        if algorithm == "remax":
            baseline = shaped_score(greedy_response(actor, row.prompt, stop, s["max_answer_seq_len"]), reward, s)
        centred = rewards.clone()
        centred[-1] -= baseline  # the token that carries the score
        returns = [sum(s["gamma"] ** (k - t) * centred[k] for k in range(t, length)) for t in range(length)]
        return torch.stack(returns)
    if algorithm == "rloo":
        value = totals[i] - (sum(totals) - totals[i]) / (n - 1)
    elif algorithm == "opo":
        lengths = [len(other.response) for other in group]
        value = totals[i] - sum(a * b for a, b in zip(lengths, totals, strict=True)) / sum(lengths)
    else:
        value = totals[i] - mean
        if algorithm == "grpo":
            value /= math.sqrt(sum((other - mean) ** 2 for other in totals) / (n - 1)) + 1e-6
    return torch.full((length,), value)


def whiten(rows: list[Row]) -> None:
    advantages = torch.cat([row.expected["advantages"] for row in rows]).double()
    mean, deviation = advantages.mean(), advantages.var(correction=0).sqrt()
    for row in rows:
        row.expected["advantages"] = ((row.expected["advantages"].double() - mean) / deviation).float()


def _per_token(new: Tensor, row: Row, s: Settings) -> Tensor:
    advantage, ratio = row.expected["advantages"], (new - row.expected["old_logprobs"]).exp()
    low, high = 1 - s["clip_range_low"], 1 + s["clip_range_high"]
    if s["policy_loss"] == "gspo":  # the ratio of the whole response, once for each token
        ratio = (new - row.expected["old_logprobs"]).mean().exp().expand(len(new))
    if s["policy_loss"] == "cispo":
        return -ratio.detach().clip(low, high) * advantage * new
    if s["policy_loss"] == "sapo":
        tau = torch.where(advantage > 0, s["sapo_positive_temperature"], s["sapo_negative_temperature"])
        return -advantage * 4 / tau * torch.sigmoid(tau * (ratio - 1))
    objective = torch.min(ratio * advantage, ratio.clip(low, high) * advantage)
    if s.get("dual_clip"):
        objective = torch.where(advantage < 0, torch.max(objective, s["dual_clip"] * advantage), objective)
    return -objective


def losses(rows: list[Row], actor: PreTrainedModel, s: Settings) -> tuple[Tensor, Tensor]:
    """The policy loss, and the total loss, over the trained rows."""
    tokens = sum(len(row.response) for row in rows)

    def mean(values: list[Tensor]) -> Tensor:
        if s["loss_aggregation"] == "token_mean":
            return sum(value.sum() for value in values) / tokens
        if s["loss_aggregation"] == "seq_mean_token_mean":
            return sum(value.mean() for value in values) / len(rows)
        return sum(value.sum() for value in values) / (s["max_answer_seq_len"] * len(rows))

    current = [logprobs(actor, row, s["temperature"]) for row in rows]
    weights = [row.expected.get("weights", 1.0) for row in rows]
    parts = [weight * _per_token(new, row, s) for weight, (new, _), row in zip(weights, current, rows, strict=True)]
    policy = total = mean(parts)
    if s["kl_in"] == "loss":
        parts = [kl_estimate(new, row.expected["ref_logprobs"], s) for (new, _), row in
                 zip(current, rows, strict=True)]  # fmt: skip
        total = total + s["kl_coef"] * mean(parts)
    return policy, total - s["entropy_coef"] * mean([entropy for _, entropy in current])
