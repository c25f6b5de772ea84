"""From logits to tokens: temperature, top-k, top-p and inverse-CDF sampling with given uniform numbers.

The randomness comes in as an argument, so a token is a pure function of its logits and its uniform number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# top-p first looks for its border among this many tokens: sorting a whole vocabulary costs more than a forward.
TOP_P_CANDIDATES = 1024
# Dividing by less takes logits out of float32's range (3.4e38): they would become infinite, and the sampling NaN.
LOWEST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class SamplingParams:
    """Which distribution a token is drawn from.

    Applied in this order: logits ÷ temperature; the top_k largest; of those, renormalised, the smallest set of largest
    probabilities whose sum reaches top_p. Tokens that tie with the last one kept are kept too, so that the support is
    a property of the values and never of a sorting order.

    Attributes:
        temperature: 0 or at least LOWEST_TEMPERATURE; 0 is greedy: the most likely token, the lowest id among equals,
            top_k and top_p unused.
        top_k: how many tokens stay, 0 = all.
        top_p: probability mass that stays, in (0, 1], 1 = all.

    Raises:
        ValueError: listing every value that is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"temperature is {self.temperature}, but it must be finite and ≥ 0 (0 decodes greedily)")
        elif 0 < self.temperature < LOWEST_TEMPERATURE:
            problems.append(
                f"temperature is {self.temperature}, but logits divided by less than {LOWEST_TEMPERATURE} leave "
                "float32's range: use 0 to decode greedily"
            )
        if self.top_k < 0:
            problems.append(f"top_k is {self.top_k}, but it counts tokens: use 0 to keep all of them")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}, but it is a probability mass in (0, 1]: use 1.0 to keep all of it")
        if problems:
            raise ValueError("; ".join(problems) + ".")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def truncate_logits(logits: Tensor, *, top_k: int, top_p: float, allow_host_sync: bool = True) -> Tensor:
    """Return logits with −inf outside the top-k, top-p support.

    Args:
        logits: [B, V] float32, temperature already applied.
        top_k: 0 keeps all.
        top_p: 1.0 keeps all.
        allow_host_sync: sort the whole vocabulary only where that is needed, which the host has to ask the device.

    Returns:
        [B, V] float32; the argument itself where nothing is cut.

    Source: Holtzman et al. 2020, section 3.1 (arXiv:1904.09751) for top-p.
    """
    vocabulary = logits.shape[-1]
    if 0 < top_k < vocabulary:
        border = logits.topk(top_k, dim=-1).values[:, -1:]  # [B, 1]
        logits = logits.masked_fill(logits < border, float("-inf"))  # NaN is never less, so it stays, and shows
    if top_p < 1:
        # Ties at the top-k border may leave more than top_k tokens, so the candidates are not bounded by it.
        ordered, mass = _ordered_mass(logits, min(vocabulary, TOP_P_CANDIDATES) if allow_host_sync else vocabulary)
        if ordered.shape[-1] < vocabulary and not bool((mass[:, -1] >= top_p).all()):
            ordered, mass = _ordered_mass(logits, vocabulary)
        # The border is the first token at which the mass reaches top_p; rounding may leave the whole sum just below.
        last = (mass < top_p).sum(dim=-1, keepdim=True).clamp(max=ordered.shape[-1] - 1)  # [B, 1]
        logits = torch.where(logits >= ordered.gather(-1, last), logits, float("-inf"))
    return logits


def _ordered_mass(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The count largest logits, falling, and the probability of each together with all before it: [B, count]."""
    ordered = logits.topk(count, dim=-1).values
    probabilities = (ordered - logits.logsumexp(dim=-1, keepdim=True)).exp()
    return ordered, probabilities.cumsum(dim=-1, dtype=torch.float64)


def sample_tokens(
    logits: Tensor, uniform: Tensor | None, params: SamplingParams, *, allow_host_sync: bool = True
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: the first whose cumulative probability, in vocabulary order, exceeds the uniform number.

    Args:
        logits: [B, V] float, any precision.
        uniform: [B] float strictly between 0 and 1; None where params are greedy.
        params: the distribution.
        allow_host_sync: see truncate_logits.

    Returns:
        tokens: [B] long. A token of probability 0 is never drawn.
        logprobs: [B] float32, in nats, under the distribution the token was drawn from (tempered, truncated,
            renormalised); a greedy token's under the model's own distribution, temperature 1 and untruncated.
            NaN or infinitely large logits give a NaN log-prob and some token of the vocabulary.
    """
    logits = logits.float()
    if params.greedy:
        probabilities = logits.softmax(dim=-1)
        tokens = logits.argmax(dim=-1)
    else:
        scaled = logits if params.temperature == 1 else logits / params.temperature
        kept = truncate_logits(scaled, top_k=params.top_k, top_p=params.top_p, allow_host_sync=allow_host_sync)
        probabilities = kept.softmax(dim=-1)
        # float64: in float32 the running sum of a large vocabulary loses the rare tokens, and u·total < total may fail.
        mass = probabilities.cumsum(dim=-1, dtype=torch.float64)
        threshold = uniform.double().unsqueeze(-1) * mass[:, -1:]  # [B, 1]
        tokens = torch.searchsorted(mass, threshold, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()
