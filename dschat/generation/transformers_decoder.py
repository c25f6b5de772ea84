"""Decoder based on transformers' `generate`: slower, but the reference implementation to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from dschat.distributed import watchdog
from dschat.generation.request import Request, Responses
from dschat.generation.rollout import Rollout, left_pad
from dschat.generation.sampling import SamplingParams, sample_tokens


class TokenSampler(LogitsProcessor):
    """Samples the tokens itself and records them with their log-probs; `generate` runs the model and the loop.

    It is a LogitsProcessor because `generate` would sample from torch's global generator, whose numbers depend on the
    batch, and would have to keep the [B, V] scores of every step to provide log-probs.
    """

    def __init__(
        self, rows: Tensor, limits: Tensor, stop_ids: Tensor, sampling: SamplingParams, responses: Responses, *,
        prompt_length: int,
    ) -> None:  # fmt: skip
        """rows, limits: [R] long; stop_ids: ids that end a response; prompt_length: columns before the response."""
        self.rows, self.limits, self.stop_ids = rows, limits, stop_ids
        self.sampling, self.responses = sampling, responses
        self.prompt_length = prompt_length
        self.live = torch.ones_like(rows, dtype=torch.bool)  # [R], True until the row has ended

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [R, P+t], scores [R, V] → scores [R, V], −inf except for the sampled token."""
        watchdog.progress()
        position = input_ids.shape[1] - self.prompt_length
        live, responses = self.live, self.responses
        indices = torch.where(live, responses.first_index(self.rows) + position, responses.discard_index)
        uniform = None if responses.uniforms is None else responses.uniforms[indices]
        tokens, logprobs = sample_tokens(scores, uniform, self.sampling)
        responses.tokens[indices] = tokens
        responses.logprobs[indices] = logprobs
        responses.lengths[self.rows] += live
        self.live = live & ~torch.isin(tokens, self.stop_ids) & (position + 1 < self.limits)
        return torch.full_like(scores, float("-inf")).scatter(1, tokens.unsqueeze(1), 0.0)


class MaxNewTokens(StoppingCriteria):
    """Stops each row at its own max_new_tokens."""

    def __init__(self, limits: Tensor, *, prompt_length: int) -> None:
        self.limits, self.prompt_length = limits, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        return input_ids.shape[1] - self.prompt_length >= self.limits


class TransformersDecoder:
    """Same interface as Decoder without `stream` and counters; gives the same rollout up to floating-point ties.

    Args:
        model: as given; its generation config (repetition penalty, …) is replaced by the defaults.
        slots: maximum rows decoded at once; None: all of them.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int | None = None) -> None:
        self.model, self.slots = model, slots
        self.model.generation_config = GenerationConfig()

    def generate(self, prompts: Sequence[Sequence[int]], **request: Any) -> Rollout:
        """Generate one response per prompt; arguments and result as in Decoder.generate."""
        validated = Request(prompts=prompts, **request)
        validated.check(self.model.config)
        device = self.model.get_input_embeddings().weight.device
        ids, mask = left_pad(prompts, pad_token_id=validated.pad_token_id, device=device)  # [B, P]
        responses = Responses(validated, device)
        for rows in torch.arange(len(ids), device=device).split(self.slots or len(ids)):
            self._generate_rows(ids[rows], mask[rows], rows, validated, responses)
        return responses.rollout(validated)

    def _generate_rows(self, ids: Tensor, mask: Tensor, rows: Tensor, request: Request, responses: Responses) -> None:
        """Generate some rows, ids and mask [R, P], and write them into `responses`."""
        device = ids.device
        stop_ids = torch.tensor(request.stop_ids, dtype=torch.long, device=device)
        limits = torch.tensor(request.limits, device=device)[rows]
        sampler = TokenSampler(rows, limits, stop_ids, request.sampling, responses, prompt_length=ids.shape[1])
        config = GenerationConfig(
            max_new_tokens=int(limits.max()), eos_token_id=request.stop_ids or None, pad_token_id=request.pad_token_id,
            do_sample=False, use_cache=True,
        )  # fmt: skip
        self.model.generate(
            ids, attention_mask=mask.long(), generation_config=config, logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([MaxNewTokens(limits, prompt_length=ids.shape[1])]),
            synced_gpus=False,
        )  # fmt: skip
