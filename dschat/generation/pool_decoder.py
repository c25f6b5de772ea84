"""PoolDecoder: decodes requests over a KV pool, sized by the free memory, with captured steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator

import torch

from dschat.generation.captured_steps import CapturedSteps
from dschat.generation.decode_batch import DecodeBatch
from dschat.generation.host_tensors import to_device
from dschat.generation.kv_pool.pool import KVPool
from dschat.generation.kv_pool.pooled_model import PooledModel
from dschat.generation.memory import free_memory
from dschat.generation.prefill import PromptKey
from dschat.generation.request import Request, Responses
from dschat.generation.scheduler import Counters, Scheduler, queue_order
from dschat.generation.step import GraphedStep, Step


class PoolDecoder:
    """Decodes requests over a KV pool sized per request; the pool and captured steps are reused where possible.

    Args:
        model: runs prefill and decoding steps.
        slots, memory_fraction, without: see Decoder.
    """

    def __init__(
        self, model: PooledModel, *, slots: int | None, memory_fraction: float, without: Collection[str]
    ) -> None:
        self.model, self.memory_fraction, self.without = model, memory_fraction, without
        self.max_slots = slots
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
        self, request: Request, responses: Responses, counters: Counters, *, weights: Hashable = None,
        streams: bool = False,
    ) -> Iterator[int]:  # fmt: skip
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
            for count_first_row in self._steps(request, responses, counters, weights):
                yield count_first_row() if streams else 0
        finally:
            self.busy = False

    def _steps(
        self, request: Request, responses: Responses, counters: Counters, weights: Hashable
    ) -> Iterator[Callable[[], int]]:
        waiting = queue_order(request)
        slots = min(self.max_slots or len(waiting), len(waiting))
        while waiting:
            scheduler = None
            try:
                scheduler = Scheduler(self, request, responses, counters, waiting, slots, weights)
                yield from scheduler.steps()
                return
            except torch.OutOfMemoryError:
                if slots == 1:
                    raise
                waiting = scheduler.unfinished if scheduler else waiting
            del scheduler
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
        lengths = {self.prompt_key(request, row): len(request.prompts[row]) for row in rows}
        row_tokens = sorted((len(request.prompts[row]) + limits[row] for row in rows), reverse=True)
        needed = 1 + min(sum(lengths.values()) + sum(limits[row] for row in rows), sum(row_tokens[:slots]))
        if self.pool is not None and self.pool.size >= needed:
            self.pool.clear()
            return self.pool
        self.free()  # before measuring the free memory
        affordable = int(self.memory_fraction * free_memory(self.device)) // self.model.bytes_per_token
        if affordable <= row_tokens[0]:
            raise torch.OutOfMemoryError(
                f"the keys and values of one row take {row_tokens[0]} tokens x {self.model.bytes_per_token} bytes, but "
                f"there is room for {affordable} tokens: shorten prompts or responses, or raise "
                "--generation_memory_fraction"
            )
        self.pool = KVPool(min(needed, affordable), kernels="kernels" not in self.without)
        return self.pool

    def step_for(
        self, request: Request, responses: Responses, pool: KVPool, *, slots: int, longest: int, weights: Hashable
    ) -> tuple[Step, Callable[[int], None]]:
        """A step over an empty decode batch and a callable that runs it, captured (and reused) where possible."""
        captures = (
            weights is not None and "graphs" not in self.without and can_capture(self.device) and self.model.can_capture
        )
        if captures:
            longest = 1 << (longest - 1).bit_length()  # rounded up, so that other requests can reuse the graphs

        def make() -> Step:
            return Step(
                self.model, pool, DecodeBatch.empty(slots, self.device), responses, request.sampling,
                to_device(request.stop_ids, self.device), longest, kernels="kernels" not in self.without,
                allow_host_sync=not captures,
            )  # fmt: skip

        if not captures:
            return (step := make()), step
        graphed = self.captured.get(
            (slots, longest, request.sampling, tuple(request.stop_ids)), (weights, id(pool), responses.addresses),
            lambda: GraphedStep(make(), memory=self._graph_memory),
        )  # fmt: skip
        graphed.step.batch.reset()
        return graphed.step, graphed

    def prompt_key(self, request: Request, row: int) -> PromptKey:
        """Rows with equal keys share their prompt's prefill, keys and values."""
        prompt = tuple(request.prompts[row])
        return (*prompt, -1 - row) if "sharing" in self.without else prompt


def can_capture(device: torch.device) -> bool:
    """Whether decoding steps can be captured on this device."""
    return device.type in ("cpu", "cuda")
