"""Decoding by transformers' own `generate`: slower, but what everyone else's results come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from dschat.generation.rollout import Rollout, left_pad
from dschat.generation.sampling import SamplingParams, sample_tokens
from dschat.tensors import seeded_uniform


class TokenChooser(LogitsProcessor):
    """Draws the tokens in `generate`'s place and notes what was drawn; `generate` runs the model and the loop.

    A processor, because `generate` would draw from torch's global generator, whose numbers depend on the batch, and
    would keep [B, V] scores of every step for log-probs to be had afterwards.
    """

    def __init__(
        self, sample_ids: Tensor, eos: Tensor, sampling: SamplingParams, *, prompt_length: int, seed: int,
        iteration: int,
    ) -> None:  # fmt: skip
        """sample_ids: [B] long; eos: ids that end a response; prompt_length: columns before the response."""
        self.sample_ids, self.eos, self.sampling, self.prompt_length = sample_ids, eos, sampling, prompt_length
        self.seed, self.iteration = seed, iteration
        self.live = torch.ones_like(sample_ids, dtype=torch.bool)  # [B], the row has not ended
        self.logprobs: list[Tensor] = []  # of [B] float32, a token each
        self.masks: list[Tensor] = []  # of [B] bool, True where the token belongs to the response

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: [B, P+t], scores: [B, V] → scores that leave the drawn token alone."""
        uniform = None
        if not self.sampling.greedy:
            position = input_ids.shape[1] - self.prompt_length
            uniform = seeded_uniform(self.seed, self.iteration, self.sample_ids, position)
        tokens, logprobs = sample_tokens(scores, uniform, self.sampling)
        self.masks.append(self.live)
        self.logprobs.append(torch.where(self.live, logprobs, 0.0))
        self.live = self.live & ~torch.isin(tokens, self.eos)
        return torch.full_like(scores, float("-inf")).scatter(1, tokens.unsqueeze(1), 0.0)


class TransformersDecoder:
    """What Decoder is, by other means: the same arguments give the same rollout, up to floating-point ties."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take a model as it stands, whose own sampling habits (repetition penalty, …) are switched off."""
        self.model = model
        self.model.generation_config = GenerationConfig()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_ids: int | Sequence[int] | None,
        pad_token_id: int,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        seed: int = 0,
        iteration: int = 0,
        sample_ids: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Rollout:
        """Decode one response for each prompt; arguments and result are those of Decoder.generate."""
        device = self.model.get_input_embeddings().weight.device
        ids, mask = left_pad(prompts, pad_token_id=pad_token_id, device=device)  # [B, P]
        stops = [eos_token_ids] if isinstance(eos_token_ids, int) else list(eos_token_ids or [])
        sample_ids = torch.arange(len(ids)) if sample_ids is None else sample_ids
        config = GenerationConfig(
            max_new_tokens=max_new_tokens, eos_token_id=stops or None, pad_token_id=pad_token_id, do_sample=False,
            use_cache=True,
        )  # fmt: skip
        parts = []
        for rows in torch.arange(len(ids), device=device).split(batch_size or len(ids)):
            chooser = TokenChooser(
                sample_ids.to(device)[rows], torch.tensor(stops, dtype=torch.long, device=device), sampling,
                prompt_length=ids.shape[1], seed=seed, iteration=iteration,
            )  # fmt: skip
            sequences = self.model.generate(
                ids[rows], attention_mask=mask[rows].long(), generation_config=config,
                logits_processor=LogitsProcessorList([chooser]), synced_gpus=False,
            )  # fmt: skip
            tokens = sequences[:, ids.shape[1] :]
            parts.append((tokens, torch.stack(chooser.masks, 1), torch.stack(chooser.logprobs, 1), ~chooser.live))
        longest = max(tokens.shape[1] for tokens, *_ in parts)
        tokens, response_mask, logprobs = (
            torch.cat([_widened(part[i], longest, fill) for part in parts])
            for i, fill in enumerate((pad_token_id, False, 0.0))
        )
        return Rollout(
            sequences=torch.cat([ids, tokens], dim=1),
            attention_mask=torch.cat([mask, response_mask], dim=1),
            response_mask=response_mask,
            logprobs=logprobs,
            ended=torch.cat([ended for *_, ended in parts]),
        )


def _widened(x: Tensor, columns: int, fill: float) -> Tensor:
    """[R, t] → [R, columns], filled on the right."""
    return torch.nn.functional.pad(x, (0, columns - x.shape[1]), value=fill)
