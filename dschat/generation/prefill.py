"""Batches prompts for prefill: prompts of similar length together, short ones packed without padding."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dschat.generation.kv_pool.pool import KVPool
from dschat.generation.kv_pool.pooled_model import PooledModel

# Maximum prompt tokens (with padding) per prefill forward: enough to fill the device, bounded for activation memory.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 32768}
# Shortest prompt of a prefill batch as a share of its longest: limits the compute wasted on padding.
MIN_LENGTH_RATIO = {"cpu": 0.85, "cuda": 0.5}
# Longest prompt that is prefilled packed with others, without padding.
MAX_PACKED_PROMPT = 64

PromptKey = tuple[int, ...]  # rows with equal keys share their prompt's prefill, keys and values


class NewPrompt(NamedTuple):
    """A prompt to prefill: its start in the pool, and its token ids."""

    start: int
    ids: list[int]


def prefill_batches(
    model: PooledModel, pool: KVPool, prompts: dict[PromptKey, NewPrompt], *, device: torch.device, pack_short: bool
) -> Iterator[tuple[list[PromptKey], Tensor]]:
    """Prefill prompts, longest first; yields the keys of every batch and the logits [U, V] after their last tokens.

    Args:
        pack_short: pack short prompts into one row.
    """
    waiting = sorted(prompts, key=lambda key: -len(prompts[key].ids))
    short_from = sum(len(prompts[key].ids) > MAX_PACKED_PROMPT for key in waiting) if pack_short else len(waiting)
    waiting, short = waiting[:short_from], waiting[short_from:]
    while short:
        sizes = accumulate(len(prompts[key].ids) for key in short)
        count = max(1, sum(size <= PREFILL_TOKENS["cpu"] for size in sizes))
        batch, short = short[:count], short[count:]
        yield batch, model.prefill_packed(pool, *_ids_and_starts(prompts, batch))
    while waiting:
        longest = len(prompts[waiting[0]].ids)
        max_rows = max(1, PREFILL_TOKENS[device.type] // longest)
        shortest = MIN_LENGTH_RATIO[device.type] * longest
        count = sum(len(prompts[key].ids) >= shortest for key in waiting[:max_rows])
        batch, waiting = waiting[:count], waiting[count:]
        yield batch, model.prefill(pool, *_ids_and_starts(prompts, batch))


def _ids_and_starts(
    prompts: dict[PromptKey, NewPrompt], keys: list[PromptKey]
) -> tuple[list[list[int]], list[int]]:
    return [prompts[key].ids for key in keys], [prompts[key].start for key in keys]
