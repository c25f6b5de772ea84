"""Fallback decoder for models that cannot run over the KV pool: padded batches with transformers' own caches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat.generation.decode_batch import DecodeBatch
from dschat.generation.draw import draw_tokens
from dschat.generation.kv_cache import new_cache
from dschat.generation.request import Request, Responses
from dschat.generation.rollout import left_pad
from dschat.generation.scheduler import Counters, first_row_tokens, queue_order
from dschat.generation.trial import TRIAL_TOKENS, accepts_argument, relative_error
from dschat.models.windows import short_windows
from dschat.tensors import position_ids

# Removing finished rows saves their share of every later step but copies the remaining cache, about the cost of one
# step. At a quarter, the copies of a whole rollout sum to at most four times its first cache.
COMPACT_WHEN_FINISHED = 0.25


class LiveRows:
    """R sequences in flight with their key-value cache.

    Attributes:
        cache: None if the model does not support one; every forward then recomputes all columns.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, mask: Tensor, *, max_new_tokens: int, cached: bool) -> None:
        """Start from left-padded prompts ids [R, P] long, mask [R, P] bool; cached: use a cache, see cache_mismatch."""
        self.model = model
        self.accepts_position_ids = accepts_argument(model, "position_ids")
        self.accepts_logits_to_keep = accepts_argument(model, "logits_to_keep")
        columns = ids.shape[1] + max_new_tokens
        self.cache = new_cache(model.config, limit=columns) if cached else None
        self.width = ids.shape[1]  # columns up to and including those of the next forward
        # Long, not bool: custom model code often does arithmetic on the mask.
        self.mask = torch.cat([mask, mask.new_ones(len(ids), max_new_tokens)], dim=1).long()  # [R, P+T]
        self.positions = position_ids(mask)  # [R, columns of the next forward]
        self.ids = ids  # [R, columns of the next forward]

    def next_logits(self) -> Tensor:
        """Run the new columns; return the logits after the last one, [R, V]."""
        inputs = {"input_ids": self.ids, "attention_mask": self.mask[:, : self.width], "return_dict": True}
        if self.accepts_position_ids:
            inputs["position_ids"] = self.positions
        if self.accepts_logits_to_keep:
            inputs["logits_to_keep"] = 1
        if self.cache is None:
            return self.model(**inputs, use_cache=False).logits[:, -1]
        return self.model(**inputs, past_key_values=self.cache, use_cache=True).logits[:, -1]

    def append(self, tokens: Tensor) -> None:
        """Append the next token [R] of each row; the next forward runs it (or all columns, without a cache)."""
        new_ids, new_positions = tokens.unsqueeze(1), self.positions[:, -1:] + 1  # [R, 1]
        if self.cache is None:
            new_ids = torch.cat([self.ids, new_ids], dim=1)
            new_positions = torch.cat([self.positions, new_positions], dim=1)
        self.ids, self.positions, self.width = new_ids, new_positions, self.width + 1

    def select(self, index: Tensor) -> None:
        """Select rows by index [R'] long, in that order; repeated indices copy the row."""
        self.ids, self.positions, self.mask = self.ids[index], self.positions[index], self.mask[index]
        if self.cache is not None:
            self.cache.reorder_cache(index)


@torch.inference_mode()
def cache_mismatch(model: PreTrainedModel) -> str | None:
    """Why decoding with transformers' cache differs from the full forward of this model; None if it does not."""
    if not accepts_argument(model, "past_key_values"):
        return "its forward accepts no key-value cache"
    embeddings = model.get_input_embeddings()
    vocabulary, device = embeddings.num_embeddings, embeddings.weight.device
    ids = torch.arange(2 * TRIAL_TOKENS, device=device).view(2, -1) * 7919 % vocabulary
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :3] = False
    steps, tolerance = 3, 1e-2 if model.dtype == torch.float32 else 0.1
    with short_windows(model):
        expected = LiveRows(model, ids, mask, max_new_tokens=0, cached=False).next_logits()
        try:
            rows = LiveRows(model, ids[:, :-steps], mask[:, :-steps], max_new_tokens=steps, cached=True)
            rows.next_logits()
            rows.select(torch.tensor([0, 1], device=device))
            for column in range(TRIAL_TOKENS - steps, TRIAL_TOKENS):
                rows.append(ids[:, column])
                logits = rows.next_logits()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # anything the model's own code raises, which may need its own cache class
            return str(error)
    error = relative_error(logits, expected)
    return None if error < tolerance else f"over transformers' cache its logits have a relative error of {error:.2g}"


def hf_cache_steps(
    model: PreTrainedModel, request: Request, responses: Responses, counters: Counters, *, slots: int | None,
    cached: bool,
) -> Iterator[int]:  # fmt: skip
    """Decode the rows of a request in padded batches; yields the first row's token count after every step."""
    device = responses.tokens.device
    for rows in torch.tensor(queue_order(request)).split(slots or len(request)):
        yield from _batch_steps(model, request, responses, counters, rows.tolist(), device, cached)


def _batch_steps(
    model: PreTrainedModel, request: Request, responses: Responses, counters: Counters, rows: list[int],
    device: torch.device, cached: bool,
) -> Iterator[int]:  # fmt: skip
    limits = request.limits
    unique: dict[tuple[int, ...], int] = {}
    prompt_index = [unique.setdefault(tuple(request.prompts[row]), len(unique)) for row in rows]
    ids, mask = left_pad(list(unique), pad_token_id=0, device=device)  # [U, P]
    live_rows = LiveRows(model, ids, mask, max_new_tokens=max(limits[row] for row in rows), cached=cached)
    counters.prefilled_tokens += sum(map(len, unique))
    logits = live_rows.next_logits()[torch.tensor(prompt_index, device=device)]  # [R, V]
    if len(unique) < len(rows):
        live_rows.select(torch.tensor(prompt_index, device=device))

    stop_ids = torch.tensor(request.stop_ids, dtype=torch.long, device=device)
    decode_batch = DecodeBatch.empty(len(rows), device)
    decode_batch.add(rows, [(0, 0, 0)] * len(rows), [limits[row] for row in rows], responses)
    while True:
        slots = slice(0, decode_batch.used)
        uniform = responses.uniforms
        if uniform is not None:
            uniform = uniform[decode_batch.write_indices(slots, responses)]
        tokens, logprobs = draw_tokens(logits, uniform, request.sampling)
        decode_batch.write(slots, tokens, logprobs, responses, stop_ids)
        live_rows.append(tokens)
        live = decode_batch.live[slots]
        live_count = int(live.sum())
        if live_count <= (1 - COMPACT_WHEN_FINISHED) * decode_batch.used:
            index = live.nonzero().squeeze(1)
            decode_batch.remove_finished(responses)
            if live_count:
                live_rows.select(index)
        yield first_row_tokens(decode_batch, responses)
        if not live_count:
            return
        counters.decoded_rows += decode_batch.used
        logits = live_rows.next_logits()  # [R, V]
