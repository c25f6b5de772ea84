"""Reference implementation of PPO in plain torch and transformers: one unpadded row at a time, without dschat."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass
class Settings:
    temperature: float
    kl_coef: float
    reward_clip: float
    missing_eos_penalty: float
    gamma: float
    gae_lambda: float
    clip_range: float
    value_clip_range: float


@dataclass
class Row:
    """One conversation: P prompt ids, T response ids, and tensors per response token (`expected`)."""

    prompt: Tensor
    response: Tensor
    ended: bool
    expected: dict[str, Tensor] = field(default_factory=dict)


def logprobs(model: PreTrainedModel, row: Row, temperature: float) -> tuple[Tensor, Tensor]:
    """[T] log-probs and entropies from the model's own logits."""
    logits = model(torch.cat([row.prompt, row.response])[None]).logits[0] / temperature
    all_logprobs = logits[len(row.prompt) - 1 : -1].log_softmax(-1)  # the logits before each response token
    return all_logprobs.gather(1, row.response[:, None])[:, 0], -(all_logprobs.exp() * all_logprobs).sum(-1)


def score(classifier: PreTrainedModel, ids: Tensor) -> Tensor:
    """[1]: the head at the last id. The classifier's own forward would use the last id that is not the pad id."""
    return classifier.score(classifier.base_model(ids[None]).last_hidden_state[0, -1])


def values(critic: PreTrainedModel, row: Row) -> Tensor:
    """[T]: the score of the prompt, of the prompt and one token, … up to all but the last token."""
    ids = torch.cat([row.prompt, row.response])
    return torch.cat([score(critic, ids[: len(row.prompt) + t]) for t in range(len(row.response))])


@torch.no_grad()
def experience(rows: list[Row], actor: PreTrainedModel, ref: PreTrainedModel, critic: PreTrainedModel,
               reward: PreTrainedModel, settings: Settings) -> None:  # fmt: skip
    """Fill `expected` of every row, advantages not whitened."""
    for row in rows:
        old, entropy = logprobs(actor, row, settings.temperature)
        ref_logprobs, _ = logprobs(ref, row, settings.temperature)
        value = values(critic, row)
        raw_score = score(reward, torch.cat([row.prompt, row.response]))[0]
        kl = old - ref_logprobs
        rewards = -settings.kl_coef * kl
        penalty = 0.0 if row.ended else settings.missing_eos_penalty
        rewards[-1] += min(max(raw_score, -settings.reward_clip), settings.reward_clip) - penalty
        length, decay = len(row.response), settings.gamma * settings.gae_lambda
        next_values = torch.cat([value[1:], torch.zeros(1)])
        delta = rewards + settings.gamma * next_values - value
        advantages = torch.stack([sum(decay ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)])
        row.expected = {
            "old_logprobs": old, "ref_logprobs": ref_logprobs, "entropy": entropy, "values": value, "kl": kl,
            "rewards": rewards, "advantages": advantages, "returns": advantages + value, "score": raw_score,
        }  # fmt: skip


def whitened(rows: list[Row]) -> list[Tensor]:
    all_advantages = torch.cat([row.expected["advantages"] for row in rows]).double()
    mean, deviation = all_advantages.mean(), all_advantages.var(correction=0).sqrt()
    return [((row.expected["advantages"].double() - mean) / deviation).float() for row in rows]


def losses(rows: list[Row], actor: PreTrainedModel, critic: PreTrainedModel, advantages: list[Tensor],
           settings: Settings) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Policy and value loss over all tokens of the rows, weighted by `expected["weights"]` (default 1)."""
    tokens = sum(len(row.response) for row in rows)
    policy, value = torch.zeros(()), torch.zeros(())
    for row, advantage in zip(rows, advantages, strict=True):
        new, _ = logprobs(actor, row, settings.temperature)
        ratio = (new - row.expected["old_logprobs"]).exp()
        low, high = 1 - settings.clip_range, 1 + settings.clip_range
        objective = torch.min(ratio * advantage, ratio.clip(low, high) * advantage)
        policy = policy - (row.expected.get("weights", 1.0) * objective).sum()
        current, old, target = values(critic, row), row.expected["values"], row.expected["returns"]
        clipped = torch.max(torch.min(current, old + settings.value_clip_range), old - settings.value_clip_range)
        value = value + torch.max((current - target) ** 2, (clipped - target) ** 2).sum() / 2
    return policy / tokens, value / tokens
