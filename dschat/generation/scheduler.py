"""Continuous batching: schedules prompts into decode slots and allocates their space in the KV pool."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dschat.generation.decode_batch import DecodeBatch
from dschat.generation.prefill import NewPrompt, PromptKey, prefill_batches
from dschat.generation.request import Request, Responses

if TYPE_CHECKING:
    from dschat.generation.pool_decoder import PoolDecoder

# Slots are refilled once this share of them is free, so that one prefill batches several prompts.
REFILL_SHARE = 1 / 8
# Decoding steps between two host reads of which rows have ended: each read synchronises with the device.
STEPS_PER_HOST_SYNC = {"cpu": 1, "cuda": 8}


class Counters(Protocol):
    """Counters of the decoding work done."""

    prefilled_tokens: int
    decoded_rows: int


@dataclass
class Prompt:
    """A prompt whose keys and values are in the pool."""

    start: int
    length: int
    logits: Tensor  # [V] after its last token


def queue_order(request: Request) -> list[int]:
    """Rows by descending response limit, so that long rows start early; then by prompt length, equal ones adjacent."""
    limits, prompts = request.limits, request.prompts
    return sorted(range(len(request)), key=lambda row: (-limits[row], -len(prompts[row]), tuple(prompts[row])))


def first_row_tokens(batch: DecodeBatch, responses: Responses) -> int:
    """Tokens generated for a single-row request, in flight or ended; undefined for several rows."""
    return int(batch.next_index[0]) - 1 if batch.used else int(responses.lengths[0])


class Scheduler:
    """One pass over a queue of rows. After an exception, rows that are not in `finished` must be run again."""

    def __init__(
        self, decoder: PoolDecoder, request: Request, responses: Responses, counters: Counters, rows: list[int],
        slots: int, weights: Hashable,
    ) -> None:  # fmt: skip
        self.decoder, self.request, self.responses, self.counters = decoder, request, responses, counters
        self.model, self.device = decoder.model, decoder.device
        self.pool = decoder.pool_for(request, rows, slots)
        self.rows, self.queue = rows, deque(rows)
        self.finished: set[int] = set()  # rows whose token count has been written
        self.limits = request.limits
        self.prompts: dict[PromptKey, Prompt] = {}
        self.unfinished_rows = Counter(decoder.prompt_key(request, row) for row in rows)  # unfinished rows per prompt
        self.in_flight: Counter[PromptKey] = Counter()  # of these, rows that have pool space
        self.response_starts: dict[int, int] = {}  # row in flight → start of its response in the pool
        self.step, self.run_step = decoder.step_for(
            request, responses, self.pool, slots=slots, weights=weights,
            longest=max(len(request.prompts[row]) + self.limits[row] for row in rows),
        )  # fmt: skip
        self.batch = self.step.batch

    @property
    def unfinished(self) -> list[int]:
        return [row for row in self.rows if row not in self.finished]

    def steps(self) -> Iterator[Callable[[], int]]:
        """Decode; after each host synchronisation yields a callable that reads the first row's token count."""
        steps_per_sync = STEPS_PER_HOST_SYNC[self.device.type]
        while self.queue or self.batch.used:
            free = self.batch.count - self.batch.used
            if self.queue and (free == self.batch.count or free >= max(1, REFILL_SHARE * self.batch.count)):
                self.admit()
                # Rows may end with their first token; if others are running, decoding those is cheaper than a sync.
                if steps_per_sync == 1 or free == self.batch.count:
                    self.remove_finished()
            yield self.first_row_tokens
            if not self.batch.used:
                continue
            for _ in range(steps_per_sync):
                self.counters.decoded_rows += self.batch.used
                self.run_step(self.batch.used)
            self.remove_finished()
        yield self.first_row_tokens

    def first_row_tokens(self) -> int:
        return first_row_tokens(self.batch, self.responses)

    def admit(self) -> None:
        """Fill free slots from the queue while the pool has space; prompts not in the pool are prefilled together.

        Raises:
            torch.OutOfMemoryError: the next row does not fit although no row is in flight.
        """
        rows, new_prompts = [], {}
        free = self.batch.count - self.batch.used
        while self.queue and len(rows) < free and self.reserve(self.queue[0], new_prompts):
            rows.append(self.queue.popleft())
        if not rows:
            if not self.batch.used:
                row = self.queue[0]
                raise torch.OutOfMemoryError(
                    f"row {row} needs {len(self.request.prompts[row]) + self.limits[row]} tokens of keys and values, "
                    f"but the empty pool has {self.pool.size - 1}: shorten prompts or responses, or raise "
                    "--generation_memory_fraction"
                )
            return
        self.prefill(new_prompts)
        prompts = [self.prompts[self.decoder.prompt_key(self.request, row)] for row in rows]
        starts = [self.response_starts[row] for row in rows]
        spans = [(prompt.start, prompt.length, start) for prompt, start in zip(prompts, starts, strict=True)]
        slots = self.batch.add(rows, spans, [self.limits[row] for row in rows], self.responses)
        self.step.draw(slots, torch.stack([prompt.logits for prompt in prompts]))

    def reserve(self, row: int, new_prompts: dict[PromptKey, NewPrompt]) -> bool:
        """Allocate pool space for a row; returns False, with nothing allocated, if there is none.

        Evicts prompts that no row in flight uses; later rows of such a prompt prefill it again.

        Args:
            new_prompts: prompts to prefill, extended by this row's if it is not in the pool.
        """
        key, prompt, runs = self.decoder.prompt_key(self.request, row), self.request.prompts[row], self.pool.allocator
        while True:
            response = runs.allocate(self.limits[row])
            if response is not None:
                has_prompt = key in self.prompts or key in new_prompts
                start = None if has_prompt else runs.allocate(len(prompt))
                if has_prompt or start is not None:
                    break
                runs.free_run(response, self.limits[row])
            if not self.evict(needed=key):
                return False
        if start is not None:
            new_prompts[key] = NewPrompt(start, prompt)
        self.response_starts[row] = response
        self.in_flight[key] += 1
        return True

    def evict(self, *, needed: PromptKey) -> bool:
        """Evict a prompt that no row in flight uses; False if there is none.

        The needed prompt is evicted only from an otherwise empty pool: its position may fragment the free space.
        """
        idle = [key for key in self.prompts if not self.in_flight[key]]
        others = [key for key in idle if key != needed]
        if others or (idle and not self.in_flight.total()):
            self.free_prompt((others or idle)[0])
            return True
        return False

    def free_prompt(self, key: PromptKey) -> None:
        """Free a prompt's pool space."""
        prompt = self.prompts.pop(key)
        self.pool.allocator.free_run(prompt.start, prompt.length)

    def prefill(self, new_prompts: dict[PromptKey, NewPrompt]) -> None:
        """Prefill new prompts and record each with the logits after its last token."""
        pack_short = self.model.can_pack and "kernels" not in self.decoder.without
        batches = prefill_batches(self.model, self.pool, new_prompts, device=self.device, pack_short=pack_short)
        for keys, logits in batches:
            for key, last in zip(keys, logits, strict=True):
                start, ids = new_prompts[key]
                self.prompts[key] = Prompt(start, len(ids), last)
                self.counters.prefilled_tokens += len(ids)

    def remove_finished(self) -> None:
        """Remove finished rows from the batch and free their pool space."""
        if "compaction" in self.decoder.without and bool(self.batch.live[: self.batch.used].any()):
            return
        for row in self.batch.remove_finished(self.responses):
            self.finished.add(row)
            self.pool.allocator.free_run(self.response_starts.pop(row), self.limits[row])
            key = self.decoder.prompt_key(self.request, row)
            self.in_flight[key] -= 1
            self.unfinished_rows[key] -= 1
            if not self.unfinished_rows[key]:
                self.free_prompt(key)
