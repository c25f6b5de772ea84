"""Token sampling: temperature, top-k, top-p and inverse-CDF sampling with given uniform numbers.

The uniform numbers are an argument, so a token is a pure function of its logits and its uniform number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# top-p first searches its cutoff among this many top tokens: sorting the whole vocabulary can cost more than a forward.
TOP_P_CANDIDATES = 1024
# Dividing by less overflows float32 (3.4e38): logits would become infinite and probabilities NaN.
MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class SamplingParams:
    """The sampling distribution.

    Applied in this order: the first vocabulary_size ids; logits ÷ temperature; the top_k largest; of those,
    renormalised, the smallest set of largest probabilities whose sum reaches top_p. Tokens that tie with the last one
    kept are kept too, so that the support does not depend on the sorting order.

    Attributes:
        temperature: 0 or at least MIN_TEMPERATURE; 0 is greedy: the most likely token, the lowest id among ties;
            top_k and top_p are ignored.
        top_k: number of tokens kept, 0 = all.
        top_p: probability mass kept, in (0, 1], 1 = all.
        vocabulary_size: ids below it can be sampled; None: all that the model has logits for. Many models have more
            rows in their head than their tokenizer has tokens.

    Raises:
        ValueError: lists every value that is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    vocabulary_size: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"temperature is {self.temperature}, but it must be finite and ≥ 0 (0 decodes greedily)")
        elif 0 < self.temperature < MIN_TEMPERATURE:
            problems.append(
                f"temperature is {self.temperature}, but logits divided by less than {MIN_TEMPERATURE} leave "
                "float32's range: use 0 to decode greedily"
            )
        if self.top_k < 0:
            problems.append(f"top_k is {self.top_k}, but it counts tokens: use 0 to keep all of them")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}, but it is a probability mass in (0, 1]: use 1.0 to keep all of it")
        if self.vocabulary_size is not None and self.vocabulary_size < 1:
            problems.append(f"vocabulary_size is {self.vocabulary_size}, but at least one id must remain")
        if problems:
            raise ValueError("; ".join(problems) + ".")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def truncates(self, vocabulary: int) -> bool:
        """Whether tokens of positive probability cannot be sampled from a model with this many ids."""
        limited = self.vocabulary_size is not None and self.vocabulary_size < vocabulary
        return limited or not self.greedy and (self.top_k > 0 or self.top_p < 1)


def vocabulary_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """The logits [B, V] of the ids that can be sampled, [B, ≤ V]."""
    size = params.vocabulary_size
    return logits if size is None or size >= logits.shape[-1] else logits[:, :size]


def truncate_logits(logits: Tensor, *, top_k: int, top_p: float, allow_host_sync: bool = True) -> Tensor:
    """Return logits with −inf outside the top-k, top-p support.

    Args:
        logits: [B, V] float32, temperature already applied.
        top_k: 0 keeps all.
        top_p: 1.0 keeps all.
        allow_host_sync: sort the whole vocabulary only if needed, which takes a host synchronisation to find out.

    Returns:
        [B, V] float32; the argument itself if nothing is truncated.

    Source: Holtzman et al. 2020, section 3.1 (arXiv:1904.09751) for top-p.
    """
    vocabulary = logits.shape[-1]
    if 0 < top_k < vocabulary:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]  # [B, 1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))  # NaN compares False, so it propagates
    if top_p < 1:
        # Ties at the top-k cutoff may leave more than top_k tokens, so top_k does not bound the candidates.
        sorted_logits, mass = _sorted_mass(logits, min(vocabulary, TOP_P_CANDIDATES) if allow_host_sync else vocabulary)
        if sorted_logits.shape[-1] < vocabulary and not bool((mass[:, -1] >= top_p).all()):
            sorted_logits, mass = _sorted_mass(logits, vocabulary)
        # The cutoff is the first token at which the mass reaches top_p; rounding may leave the total just below it.
        last = (mass < top_p).sum(dim=-1, keepdim=True).clamp(max=sorted_logits.shape[-1] - 1)  # [B, 1]
        logits = torch.where(logits >= sorted_logits.gather(-1, last), logits, float("-inf"))
    return logits


def _sorted_mass(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits in descending order, and their cumulative probabilities: [B, count] each."""
    sorted_logits = logits.topk(count, dim=-1).values
    probabilities = (sorted_logits - logits.logsumexp(dim=-1, keepdim=True)).exp()
    return sorted_logits, probabilities.cumsum(dim=-1, dtype=torch.float64)


def sample_tokens(
    logits: Tensor, uniform: Tensor | None, params: SamplingParams, *, allow_host_sync: bool = True
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: the first whose cumulative probability, in vocabulary order, exceeds the uniform number.

    Args:
        logits: [B, V] float, any precision.
        uniform: [B] float strictly between 0 and 1; None if params are greedy.
        params: the sampling distribution.
        allow_host_sync: see truncate_logits.

    Returns:
        tokens: [B] long. A token of probability 0 is never drawn.
        logprobs: [B] float32, in nats, under the sampling distribution (tempered, truncated, renormalised); for greedy
            tokens under the model distribution (temperature 1, untruncated).
            NaN or +inf logits give a NaN log-prob and an arbitrary token of the vocabulary.
    """
    logits = vocabulary_logits(logits, params).float()
    if params.greedy:
        probabilities = logits.softmax(dim=-1)
        tokens = logits.argmax(dim=-1)
    else:
        scaled = logits if params.temperature == 1 else logits / params.temperature
        truncated = truncate_logits(scaled, top_k=params.top_k, top_p=params.top_p, allow_host_sync=allow_host_sync)
        probabilities = truncated.softmax(dim=-1)
        # float64: a float32 cumulative sum over a large vocabulary loses rare tokens, and u·total < total may fail.
        mass = probabilities.cumsum(dim=-1, dtype=torch.float64)
        threshold = uniform.double().unsqueeze(-1) * mass[:, -1:]  # [B, 1]
        tokens = torch.searchsorted(mass, threshold, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()
