"""Which prompts are decoded when, and where their keys and values lie."""

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

# Padded prompt tokens of one forward: enough to fill the device, few enough to bound activations.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 32768}
# Shortest prompt of a forward as a share of its longest: padding is computed, too.
PREFILL_ALIKE = {"cpu": 0.85, "cuda": 0.5}
# Free slots wait until this share of all is free, so that a refill's prefill serves several rows.
REFILL_SHARE = 1 / 8
# Steps between two looks of the host at which rows have ended: a look waits for the device.
STEPS_PER_HOST_SYNC = {"cpu": 1, "cuda": 8}


# Longest prompt that is run token by token beside others, without padding.
PACKED_PROMPT = 64
NewPrompt = tuple[tuple[int, ...], tuple[int, list[int]]]  # name; start in the pool, and ids


class Counts(Protocol):
    """Where the cost of decoding is counted."""

    prefilled_tokens: int
    decoded_rows: int


@dataclass
class Prompt:
    """A prompt whose keys and values are in the pool."""

    start: int
    length: int
    logits: Tensor  # [V] after its last token


class Rollouts:
    """Runs requests over a pool that is sized for each; what can be kept for the next one is kept.

    Args:
        model: what runs the tokens.
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
        # The graphs share their memory: they never overlap.
        self._graph_memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """What is kept for the next request."""
        pool = 0 if self.pool is None else self.pool.size * self.model.bytes_per_token
        return pool + self.captured.nbytes

    def steps(
        self, request: Request, responses: Responses, counts: Counts, *, weights: Hashable = None, streams: bool = False
    ) -> Iterator[int]:
        """Decode all rows; after every look of the host the number of tokens that the first row has.

        Out of memory, the unfinished rows begin again with half the slots: their tokens are the same.

        Args:
            weights: where they lie and stay, so that steps may be captured; None: they may move.
            streams: whether that number is wanted; else it is 0, since the host would wait for it.

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
        """Let go of the pool, and of the captured steps that use it."""
        self.pool = None
        self.captured.clear()

    def pool_for(self, request: Request, rows: list[int], slots: int) -> KVPool:
        """A pool with room for what can be in flight at once, as far as memory goes."""
        limits = request.limits
        lengths = {self.name(request, row): len(request.prompts[row]) for row in rows}
        each = sorted((len(request.prompts[row]) + limits[row] for row in rows), reverse=True)
        wanted = 1 + min(sum(lengths.values()) + sum(limits[row] for row in rows), sum(each[:slots]))
        if self.pool is not None and self.pool.size >= wanted:
            self.pool.clear()
            return self.pool
        self.free()  # its memory first
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
        """A step over empty slots, and what runs it: captured where that is possible, with the graphs of last time."""
        captures = (
            weights is not None and "graphs" not in self.without and can_capture(self.device) and self.model.captures
        )
        if captures:
            longest = 1 << (longest - 1).bit_length()  # a bound, so that graphs serve other requests too

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
        """Rows of the same name share their prompt's prefill, keys and values."""
        prompt = tuple(request.prompts[row])
        return (*prompt, -1 - row) if "sharing" in self.without else prompt


def can_capture(device: torch.device) -> bool:
    """Whether steps can be captured there."""
    return device.type in ("cpu", "cuda")


def queue_order(request: Request) -> list[int]:
    """Longest possible responses first, so that no long row starts last; then longest prompts, equal ones together."""
    limits, prompts = request.limits, request.prompts
    return sorted(range(len(request)), key=lambda row: (-limits[row], -len(prompts[row]), tuple(prompts[row])))


def first_row_tokens(slots: DecodeBatch, responses: Responses) -> int:
    """How many tokens the only row of a request has, in flight or ended; meaningless for several rows."""
    return int(slots.cells[0]) - 1 if slots.used else int(responses.counts[0])


class _Rollout:
    """One pass over a queue of rows. After an exception what is not in `finished` has to be run again."""

    def __init__(
        self, owner: Rollouts, request: Request, responses: Responses, counts: Counts, rows: list[int], slots: int,
        weights: Hashable,
    ) -> None:  # fmt: skip
        self.owner, self.request, self.responses, self.counts = owner, request, responses, counts
        self.model, self.device = owner.model, owner.device
        self.pool = owner.pool_for(request, rows, slots)
        self.rows, self.queue = rows, deque(rows)
        self.finished: set[int] = set()  # rows whose number of tokens is noted
        self.limits = request.limits
        self.prompts: dict[tuple[int, ...], Prompt] = {}
        self.users = Counter(owner.name(request, row) for row in rows)  # rows not finished yet
        self.in_flight: Counter[tuple[int, ...]] = Counter()  # of them, those with a place in the pool
        self.places: dict[int, int] = {}  # of each row in flight: where its response begins in the pool
        self.step, self.run_step = owner.step_for(
            request, responses, self.pool, slots=slots, weights=weights,
            longest=max(len(request.prompts[row]) + self.limits[row] for row in rows),
        )  # fmt: skip
        self.slots = self.step.slots

    @property
    def unfinished(self) -> list[int]:
        return [row for row in self.rows if row not in self.finished]

    def steps(self) -> Iterator[Callable[[], int]]:
        """Decode; after each look of the host, what reads how many tokens the first row has."""
        steps_per_look = STEPS_PER_HOST_SYNC[self.device.type]
        while self.queue or self.slots.used:
            free = self.slots.count - self.slots.used
            if self.queue and (free == self.slots.count or free >= max(1, REFILL_SHARE * self.slots.count)):
                self.admit()
                # Rows may end by their first token. Beside others they cost less than waiting for the device.
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
        """Fill free slots from the queue, as far as the pool goes; prompts that are new to it run together.

        Raises:
            torch.OutOfMemoryError: nothing is in flight, and yet the next row has no room.
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
        """Take a row's part of the pool; False: there is none, and nothing was taken.

        Prompts that no row in flight uses make room; their next row runs them again.

        Args:
            fresh: takes the prompt in where it is not in the pool: name → where, and ids.
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
        """Give up a prompt that no row in flight uses; False: there is none.

        The needed one only where nothing else is in the pool: it may lie so that its own row finds no room beside it.
        """
        idle = [name for name in self.prompts if not self.in_flight[name]]
        others = [name for name in idle if name != needed]
        if others or (idle and not self.in_flight.total()):
            self.drop((others or idle)[0])
            return True
        return False

    def drop(self, name: tuple[int, ...]) -> None:
        """Give a prompt's part of the pool back."""
        prompt = self.prompts.pop(name)
        self.pool.runs.free_run(prompt.start, prompt.length)

    def prefill(self, fresh: dict[tuple[int, ...], tuple[int, list[int]]]) -> None:
        """Run new prompts, similar lengths together: name → where in the pool, and ids."""
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
        """Run prompts that are short, of those sorted by falling length, without padding; the others."""
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
        """Prompts that have run; logits [U, V] after each."""
        for (name, (start, prompt)), last in zip(part, logits, strict=True):
            self.prompts[name] = Prompt(start, len(prompt), last)
            self.counts.prefilled_tokens += len(prompt)

    def retire(self) -> None:
        """Let finished rows go, with their places in the pool."""
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
