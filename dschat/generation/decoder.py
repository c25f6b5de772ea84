"""Token-by-token decoding of any causal language model: shared prefill, finished rows leave, one step a token."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat.generation.live_rows import LiveRows, takes
from dschat.generation.rollout import Rollout, left_pad
from dschat.generation.sampling import SamplingParams, sample_tokens
from dschat.tensors import seeded_uniform

# A row that leaves saves its share of every later step; letting rows leave costs one copy of the cache that stays,
# about what one step reads. At a quarter the copies of a whole rollout sum to at most four times its first cache.
LEAVE_WHEN_FINISHED = 0.25
# Uniform numbers are hashed for this many positions at once: the hash is many small operations.
UNIFORM_BLOCK = 32


class Step(NamedTuple):
    """One decoding step of the R rows still in the batch."""

    rows: Tensor  # [R] long, their place in the caller's list
    tokens: Tensor  # [R] long
    logprobs: Tensor  # [R] float32
    live: Tensor  # [R] bool, True where the row had not ended before this token
    ended: Tensor  # [R] bool, True where this token is the row's EOS


class Decoder:
    """Decodes with a model as it stands: the caller sees to eval mode, full-size weights and no adapters.

    Attributes:
        prefilled_tokens: prompt tokens run so far; a prompt that several samples share counts once.
        decoded_rows: rows fed so far, summed over steps, prefill apart: what decoding has cost.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.prefilled_tokens = 0
        self.decoded_rows = 0
        if not takes(model, "past_key_values"):
            warnings.warn(
                f"{type(model).__name__} takes no past_key_values: every token runs the whole sequence again. "
                "Results are right, decoding is slow.",
                stacklevel=2,
            )

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
        """Decode one response for each prompt.

        A row's tokens depend on its prompt, the weights, the sampling, and (seed, iteration, sample id) alone, up to
        floating-point ties: neither on batch_size nor on the other rows.

        Args:
            prompts: B non-empty lists of ids. Equal prompts share one prefill.
            max_new_tokens: ≥ 1, the EOS included.
            eos_token_ids: ids that end a response; None or empty: none does.
            pad_token_id: fills what the masks leave out; it may equal an EOS.
            sampling: the distribution.
            seed, iteration, sample_ids: name the random numbers; sample_ids [B] long, unique over all ranks, default
                0 … B−1. Equal ids draw equal numbers.
            batch_size: most rows decoded at once; None: all of them.

        Raises:
            ValueError: an empty prompt, a number out of range, or more tokens than the model has positions.
        """
        device = self.model.get_input_embeddings().weight.device
        prompt_ids, prompt_mask = left_pad(prompts, pad_token_id=pad_token_id, device=device)  # [B, P]
        count = len(prompts)
        sample_ids = torch.arange(count) if sample_ids is None else sample_ids
        self._check(prompts, max_new_tokens, sample_ids, batch_size)

        tokens = torch.full((count, max_new_tokens), pad_token_id, dtype=torch.long, device=device)  # [B, T]
        logprobs = torch.zeros(count, max_new_tokens, device=device)
        response_mask = torch.zeros(count, max_new_tokens, dtype=torch.bool, device=device)
        ended = torch.zeros(count, dtype=torch.bool, device=device)
        longest = 0
        # Longest prompts first and equal ones side by side: little padding in a batch, and the prefill stays shared.
        order = sorted(range(count), key=lambda i: (-len(prompts[i]), tuple(prompts[i])))
        for places in torch.tensor(order).split(batch_size or count):  # [R]
            steps = self._steps(
                [prompts[i] for i in places.tolist()],
                max_new_tokens=max_new_tokens,
                eos_token_ids=eos_token_ids,
                sampling=sampling,
                seed=seed,
                iteration=iteration,
                sample_ids=sample_ids.to(device)[places.to(device)],
            )
            places = places.to(device)
            for column, step in enumerate(steps):
                rows = places[step.rows]
                tokens[rows, column] = torch.where(step.live, step.tokens, pad_token_id)
                logprobs[rows, column] = torch.where(step.live, step.logprobs, 0.0)
                response_mask[rows, column] = step.live
                ended[rows] |= step.ended
                longest = max(longest, column + 1)
        response_mask = response_mask[:, :longest]
        return Rollout(
            sequences=torch.cat([prompt_ids, tokens[:, :longest]], dim=1),
            attention_mask=torch.cat([prompt_mask, response_mask], dim=1),
            response_mask=response_mask.clone(),
            logprobs=logprobs[:, :longest].clone(),
            ended=ended,
        )

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        eos_token_ids: int | Sequence[int] | None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        seed: int = 0,
        iteration: int = 0,
        sample_id: int = 0,
    ) -> Iterator[int]:
        """Yield the tokens that generate() would return for this one prompt as they come, the EOS included."""
        sample_ids = torch.tensor([sample_id])
        left_pad([prompt], pad_token_id=0, device=torch.device("cpu"))
        self._check([prompt], max_new_tokens, sample_ids, None)
        steps = self._steps(
            [prompt],
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
            sampling=sampling,
            seed=seed,
            iteration=iteration,
            sample_ids=sample_ids.to(self.model.get_input_embeddings().weight.device),
        )
        for step in steps:
            yield int(step.tokens[0])

    @torch.inference_mode()
    def _steps(
        self,
        prompts: list[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_ids: int | Sequence[int] | None,
        sampling: SamplingParams,
        seed: int,
        iteration: int,
        sample_ids: Tensor,
    ) -> Iterator[Step]:
        """Decode prompts together, one Step a token, until all have ended or max_new_tokens have come."""
        device = sample_ids.device
        unique: dict[tuple[int, ...], int] = {}
        shared = [unique.setdefault(tuple(prompt), len(unique)) for prompt in prompts]
        # Any id will do where the mask is False, so padding needs no name here.
        ids, mask = left_pad(list(unique), pad_token_id=0, device=device)  # [U, P]
        batch = LiveRows(self.model, ids, mask, max_new_tokens=max_new_tokens)
        logits = batch.next_logits()  # [U, V]
        self.prefilled_tokens += sum(len(prompt) for prompt in unique)
        if len(unique) < len(prompts):
            index = torch.tensor(shared, device=device)
            batch.select(index)
            logits = logits[index]  # [R, V]

        eos = _eos_tensor(eos_token_ids, device)
        rows = torch.arange(len(prompts), device=device)
        live = torch.ones(len(prompts), dtype=torch.bool, device=device)
        uniforms = None
        for position in range(max_new_tokens):
            if not sampling.greedy and position % UNIFORM_BLOCK == 0:
                ahead = torch.arange(position, position + UNIFORM_BLOCK, device=device)
                uniforms = seeded_uniform(seed, iteration, sample_ids[rows].unsqueeze(1), ahead)  # [R, block]
            uniform = None if uniforms is None else uniforms[:, position % UNIFORM_BLOCK]
            tokens, logprobs = sample_tokens(logits, uniform, sampling)
            ended = live & torch.isin(tokens, eos)
            yield Step(rows, tokens, logprobs, live, ended)

            live = live & ~ended
            count = int(live.sum()) if len(eos) else len(rows)
            if count == 0 or position + 1 == max_new_tokens:
                return
            batch.append(tokens)
            if count <= (1 - LEAVE_WHEN_FINISHED) * len(rows):
                index = live.nonzero().squeeze(1)
                batch.select(index)
                rows, live = rows[index], live[index]
                uniforms = None if uniforms is None else uniforms[index]
            logits = batch.next_logits()  # [R, V]
            self.decoded_rows += len(rows)

    def _check(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sample_ids: Tensor,
        batch_size: int | None,
    ) -> None:
        """Raise one ValueError with everything that is wrong with a call."""
        problems = []
        if max_new_tokens < 1:
            problems.append(f"max_new_tokens is {max_new_tokens}, but a response has at least 1 token")
        if batch_size is not None and batch_size < 1:
            problems.append(f"batch_size is {batch_size}, but it counts rows: use ≥ 1, or None for all at once")
        if sample_ids.shape != (len(prompts),):
            problems.append(f"sample_ids has shape {tuple(sample_ids.shape)}, but there are {len(prompts)} prompts")
        longest = max(len(prompt) for prompt in prompts)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        # The last token is never fed, so it needs no position.
        if limit is not None and longest + max_new_tokens - 1 > limit:
            problems.append(
                f"the longest prompt has {longest} tokens, with max_new_tokens {max_new_tokens} that is "
                f"{longest + max_new_tokens}, but the model has {limit} positions: shorten one of them"
            )
        if problems:
            raise ValueError("; ".join(problems) + ".")


def _eos_tensor(eos_token_ids: int | Sequence[int] | None, device: torch.device) -> Tensor:
    ids = [] if eos_token_ids is None else [eos_token_ids] if isinstance(eos_token_ids, int) else list(eos_token_ids)
    return torch.tensor(ids, dtype=torch.long, device=device)
