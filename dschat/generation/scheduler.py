"""Continuous batching: schedules prompts into decode slots and allocates their space in the KV pool."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from dschat.generation.captured_steps import CapturedSteps
from dschat.generation.decode_batch import DecodeBatch
from dschat.generation.host_tensors import to_device
from dschat.generation.kv_pool import KVPool, PooledModel
from dschat.generation.memory import free_memory
from dschat.generation.request import Request, Responses
from dschat.generation.step import GraphedStep, Step

# Most prompt tokens (padding included) per prefill forward: enough to fill the device, bounded for activation memory.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 32768}
# Shortest prompt of a prefill batch as a share of its longest: limits the compute wasted on padding.
PREFILL_ALIKE = {"cpu": 0.85, "cuda": 0.5}
# Slots are refilled once this share of them is free, so that one prefill batches several prompts.
REFILL_SHARE = 1 / 8
# Decoding steps between two host reads of which rows have ended: each read synchronises with the device.
STEPS_PER_HOST_SYNC = {"cpu": 1, "cuda": 8}


# Longest prompt that is prefilled packed with others, without padding.
PACKED_PROMPT = 64
NewPrompt = tuple[tuple[int, ...], tuple[int, list[int]]]  # sharing key; start in the pool, token ids


class Counts(Protocol):
    """Counters of the decoding work done."""

    prefilled_tokens: int
    decoded_rows: int


@dataclass
class Prompt:
    """A prompt whose keys and values are in the pool."""

    start: int
    length: int
    logits: Tensor  # [V] after its last token


class Rollouts:
    """Runs requests over a KV pool sized for each; reuses the pool and captured steps for the next where possible.

    Args:
        model: runs prefill and decoding steps.
        slots, memory_fraction, without: see Decoder.
    """

    def __init__(
        self, model: PooledModel, *, slots: int | None, memory_fraction: float, without: Collection[str]
    ) -> None:
        self.model, self.memory_fraction, self.without = model, memory_fraction, without
        self.most_slots = slots
        self.device = model.model.get_input_embeddings().weight.device
        self.pool: KVPool | None = None
        self.busy = False
        self.captured = CapturedSteps()
        # CUDA graphs share one memory pool: they never run concurrently.
        self._graph_memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Bytes kept allocated for the next request."""
        pool = 0 if self.pool is None else self.pool.size * self.model.bytes_per_token
        return pool + self.captured.nbytes

    def steps(
        self, request: Request, responses: Responses, counts: Counts, *, weights: Hashable = None, streams: bool = False
    ) -> Iterator[int]:
        """Decode all rows; yields the first row's token count after every host synchronisation.

        If memory runs out, the unfinished rows restart with half the slots and produce the same tokens.

        Args:
            weights: fixed addresses of the weights, which allow steps to be captured; None: addresses may change.
            streams: yield the actual count; otherwise yields 0, which saves a host synchronisation.

        Raises:
            torch.OutOfMemoryError: one row alone does not fit.
        """
        self.busy = True
        try:
            for count_first_row in self._steps(request, responses, counts, weights):
                yield count_first_row() if streams else 0
        finally:
            self.busy = False

    def _steps(
        self, request: Request, responses: Responses, counts: Counts, weights: Hashable
    ) -> Iterator[Callable[[], int]]:
        waiting = queue_order(request)
        slots = min(self.most_slots or len(waiting), len(waiting))
        while waiting:
            rollout = None
            try:
                rollout = _Rollout(self, request, responses, counts, waiting, slots, weights)
                yield from rollout.steps()
                return
            except torch.OutOfMemoryError:
                if slots == 1:
                    raise
                waiting = rollout.unfinished if rollout else waiting
            del rollout
            self.free()
            slots = max(1, slots // 2)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def free(self) -> None:
        """Free the pool and the captured steps that use it."""
        self.pool = None
        self.captured.clear()

    def pool_for(self, request: Request, rows: list[int], slots: int) -> KVPool:
        """A pool large enough for all rows that can be in flight at once, bounded by the available memory."""
        limits = request.limits
        lengths = {self.name(request, row): len(request.prompts[row]) for row in rows}
        each = sorted((len(request.prompts[row]) + limits[row] for row in rows), reverse=True)
        wanted = 1 + min(sum(lengths.values()) + sum(limits[row] for row in rows), sum(each[:slots]))
        if self.pool is not None and self.pool.size >= wanted:
            self.pool.clear()
            return self.pool
        self.free()  # before measuring the free memory
        affordable = int(self.memory_fraction * free_memory(self.device)) // self.model.bytes_per_token
        if affordable <= each[0]:
            raise torch.OutOfMemoryError(
                f"the keys and values of one row take {each[0]} tokens x {self.model.bytes_per_token} bytes, but there "
                f"is room for {affordable} tokens: shorten prompts or responses, or raise --generation_memory_fraction"
            )
        self.pool = KVPool(min(wanted, affordable), kernels="kernels" not in self.without)
        return self.pool

    def step_for(
        self, request: Request, responses: Responses, pool: KVPool, *, slots: int, longest: int, weights: Hashable
    ) -> tuple[Step, Callable[[int], None]]:
        """A step over an empty decode batch and a callable that runs it, captured (and reused) where possible."""
        captures = (
            weights is not None and "graphs" not in self.without and can_capture(self.device) and self.model.captures
        )
        if captures:
            longest = 1 << (longest - 1).bit_length()  # rounded up, so that other requests can reuse the graphs

        def make() -> Step:
            return Step(
                self.model, pool, DecodeBatch.empty(slots, self.device), responses, request.sampling,
                to_device(request.stops, self.device), longest, kernels="kernels" not in self.without,
                allow_host_sync=not captures,
            )  # fmt: skip

        if not captures:
            return (step := make()), step
        graphed = self.captured.get(
            (slots, longest, request.sampling, tuple(request.stops)), (weights, id(pool), responses.addresses),
            lambda: GraphedStep(make(), memory=self._graph_memory),
        )  # fmt: skip
        graphed.step.slots.reset()
        return graphed.step, graphed

    def name(self, request: Request, row: int) -> tuple[int, ...]:
        """Sharing key: rows with equal keys share their prompt's prefill, keys and values."""
        prompt = tuple(request.prompts[row])
        return (*prompt, -1 - row) if "sharing" in self.without else prompt


def can_capture(device: torch.device) -> bool:
    """Whether decoding steps can be captured on this device."""
    return device.type in ("cpu", "cuda")


def queue_order(request: Request) -> list[int]:
    """Rows by descending response limit, so that long rows start early; then by prompt length, equal ones adjacent."""
    limits, prompts = request.limits, request.prompts
    return sorted(range(len(request)), key=lambda row: (-limits[row], -len(prompts[row]), tuple(prompts[row])))


def first_row_tokens(slots: DecodeBatch, responses: Responses) -> int:
    """Tokens generated for a single-row request, in flight or ended; undefined for several rows."""
    return int(slots.cells[0]) - 1 if slots.used else int(responses.counts[0])


class _Rollout:
    """One pass over a queue of rows. After an exception, rows that are not in `finished` must be run again."""

    def __init__(
        self, owner: Rollouts, request: Request, responses: Responses, counts: Counts, rows: list[int], slots: int,
        weights: Hashable,
    ) -> None:  # fmt: skip
        self.owner, self.request, self.responses, self.counts = owner, request, responses, counts
        self.model, self.device = owner.model, owner.device
        self.pool = owner.pool_for(request, rows, slots)
        self.rows, self.queue = rows, deque(rows)
        self.finished: set[int] = set()  # rows whose token count has been written
        self.limits = request.limits
        self.prompts: dict[tuple[int, ...], Prompt] = {}
        self.users = Counter(owner.name(request, row) for row in rows)  # unfinished rows per prompt
        self.in_flight: Counter[tuple[int, ...]] = Counter()  # of these, rows with pool space allocated
        self.places: dict[int, int] = {}  # row in flight → start of its response in the pool
        self.step, self.run_step = owner.step_for(
            request, responses, self.pool, slots=slots, weights=weights,
            longest=max(len(request.prompts[row]) + self.limits[row] for row in rows),
        )  # fmt: skip
        self.slots = self.step.slots

    @property
    def unfinished(self) -> list[int]:
        return [row for row in self.rows if row not in self.finished]

    def steps(self) -> Iterator[Callable[[], int]]:
        """Decode; after each host synchronisation yields a callable that reads the first row's token count."""
        steps_per_look = STEPS_PER_HOST_SYNC[self.device.type]
        while self.queue or self.slots.used:
            free = self.slots.count - self.slots.used
            if self.queue and (free == self.slots.count or free >= max(1, REFILL_SHARE * self.slots.count)):
                self.admit()
                # Rows may end with their first token; if others are running, decoding those is cheaper than a sync.
                if steps_per_look == 1 or free == self.slots.count:
                    self.retire()
            yield self.first_row_tokens
            if not self.slots.used:
                continue
            for _ in range(steps_per_look):
                self.counts.decoded_rows += self.slots.used
                self.run_step(self.slots.used)
            self.retire()
        yield self.first_row_tokens

    def first_row_tokens(self) -> int:
        return first_row_tokens(self.slots, self.responses)

    def admit(self) -> None:
        """Fill free slots from the queue while the pool has space; prompts not in the pool are prefilled together.

        Raises:
            torch.OutOfMemoryError: the next row does not fit although no row is in flight.
        """
        rows, fresh = [], {}
        while self.queue and len(rows) < self.slots.count - self.slots.used and self.reserve(self.queue[0], fresh):
            rows.append(self.queue.popleft())
        if not rows:
            if not self.slots.used:
                row = self.queue[0]
                raise torch.OutOfMemoryError(
                    f"row {row} needs {len(self.request.prompts[row]) + self.limits[row]} tokens of keys and values, "
                    f"but the empty pool has {self.pool.size - 1}: shorten prompts or responses, or raise "
                    "--generation_memory_fraction"
                )
            return
        self.prefill(fresh)
        prompts = [self.prompts[self.owner.name(self.request, row)] for row in rows]
        spans = [(prompt.start, prompt.length, self.places[row]) for prompt, row in zip(prompts, rows, strict=True)]
        places = self.slots.add(rows, spans, [self.limits[row] for row in rows], self.responses)
        self.step.draw(places, torch.stack([prompt.logits for prompt in prompts]))

    def reserve(self, row: int, fresh: dict[tuple[int, ...], tuple[int, list[int]]]) -> bool:
        """Allocate pool space for a row; returns False, with nothing allocated, if there is none.

        Evicts prompts that no row in flight uses; later rows of such a prompt prefill it again.

        Args:
            fresh: prompts to prefill, extended by this row's if it is not in the pool: key → start in the pool, ids.
        """
        name, prompt, runs = self.owner.name(self.request, row), self.request.prompts[row], self.pool.runs
        while True:
            response = runs.allocate(self.limits[row])
            if response is not None:
                there = name in self.prompts or name in fresh
                start = None if there else runs.allocate(len(prompt))
                if there or start is not None:
                    break
                runs.free_run(response, self.limits[row])
            if not self.evict(needed=name):
                return False
        if start is not None:
            fresh[name] = (start, prompt)
        self.places[row] = response
        self.in_flight[name] += 1
        return True

    def evict(self, *, needed: tuple[int, ...]) -> bool:
        """Evict a prompt that no row in flight uses; False if there is none.

        The needed prompt is evicted only from an otherwise empty pool: its position may fragment the free space.
        """
        idle = [name for name in self.prompts if not self.in_flight[name]]
        others = [name for name in idle if name != needed]
        if others or (idle and not self.in_flight.total()):
            self.drop((others or idle)[0])
            return True
        return False

    def drop(self, name: tuple[int, ...]) -> None:
        """Free a prompt's pool space."""
        prompt = self.prompts.pop(name)
        self.pool.runs.free_run(prompt.start, prompt.length)

    def prefill(self, fresh: dict[tuple[int, ...], tuple[int, list[int]]]) -> None:
        """Prefill new prompts (key → start in the pool, ids), batched by similar length."""
        waiting = sorted(fresh.items(), key=lambda item: -len(item[1][1]))
        while waiting:
            waiting = self.prefill_short(waiting)
            if not waiting:
                return
            longest = len(waiting[0][1][1])
            most = max(1, PREFILL_TOKENS[self.device.type] // longest)
            alike = sum(len(prompt) >= PREFILL_ALIKE[self.device.type] * longest for _, (_, prompt) in waiting[:most])
            part, waiting = waiting[:alike], waiting[alike:]
            starts, prompts = zip(*(place for _, place in part), strict=True)
            self.note(part, self.model.prefill(self.pool, prompts, starts))

    def prefill_short(self, waiting: list[NewPrompt]) -> list[NewPrompt]:
        """Prefill the short ones of prompts sorted by descending length, packed; returns the remaining ones."""
        if not self.model.packs or "kernels" in self.owner.without:
            return waiting
        long = sum(len(prompt) > PACKED_PROMPT for _, (_, prompt) in waiting)
        short, waiting = waiting[long:], waiting[:long]
        while short:
            sizes = accumulate(len(prompt) for _, (_, prompt) in short)
            count = max(1, sum(size <= PREFILL_TOKENS["cpu"] for size in sizes))
            part, short = short[:count], short[count:]
            starts, prompts = zip(*(place for _, place in part), strict=True)
            self.note(part, self.model.prefill_packed(self.pool, prompts, starts))
        return waiting

    def note(self, part: list[NewPrompt], logits: Tensor) -> None:
        """Record prefilled prompts with the logits [U, V] after their last tokens."""
        for (name, (start, prompt)), last in zip(part, logits, strict=True):
            self.prompts[name] = Prompt(start, len(prompt), last)
            self.counts.prefilled_tokens += len(prompt)

    def retire(self) -> None:
        """Remove finished rows from the batch and free their pool space."""
        if "compaction" in self.owner.without and bool(self.slots.live[: self.slots.used].any()):
            return
        for row in self.slots.leave(self.responses):
            self.finished.add(row)
            self.pool.runs.free_run(self.places.pop(row), self.limits[row])
            name = self.owner.name(self.request, row)
            self.in_flight[name] -= 1
            self.users[name] -= 1
            if not self.users[name]:
                self.drop(name)
