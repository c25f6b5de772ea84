"""One decoding step, as a function of tensors that stay where they are, and its capture."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.generation.cpu.step_recording import Recording, record
from dschat.generation.cuda import graph
from dschat.generation.cuda.graph import CapturedGraph
from dschat.generation.decode_batch import DecodeBatch
from dschat.generation.draw import draw_tokens
from dschat.generation.kv_pool import KVPool, PooledModel
from dschat.generation.request import Responses
from dschat.generation.sampling import SamplingParams

# A capture costs about as much as this many steps whose kernels are launched one by one: a size with fewer is not worth
# one, and one with more has lost no more than what a capture costs (the rule for renting skis).
RUNS_BEFORE_CAPTURE = 4


@dataclass(frozen=True)
class Step:
    """One token for each of the first rows in flight: forward, draw, note, see who has ended. The host takes no part.

    Attributes:
        model, pool, slots, responses: what it reads and writes.
        sampling, stops: how tokens are drawn, and [n] long which of them end a row.
        longest: no context gets longer.
        kernels: use our own kernels where there are some.
        allow_host_sync: drawing may wait for the device where that saves work.
    """

    model: PooledModel
    pool: KVPool
    slots: DecodeBatch
    responses: Responses
    sampling: SamplingParams
    stops: Tensor
    longest: int
    kernels: bool = True
    allow_host_sync: bool = True

    def __call__(self, count: int) -> None:
        """Run the first count places; those without a row run a token that nobody reads."""
        tokens, spans = self.slots.advance(count)
        logits = self.model.decode(self.pool, tokens, spans, longest=self.longest)  # [R, V]
        self.draw(slice(0, count), logits)

    def draw(self, places: slice, logits: Tensor) -> None:
        """Draw the next token of some places from logits [n, V]."""
        uniform = None
        if self.responses.uniforms is not None:
            uniform = self.responses.uniforms[self.slots.next_cells(places, self.responses)]
        tokens, logprobs = draw_tokens(
            logits, uniform, self.sampling, kernels=self.kernels, allow_host_sync=self.allow_host_sync
        )
        self.slots.write(places, tokens, logprobs, self.responses, self.stops)


def graph_batch_sizes(most: int) -> list[int]:
    """Row counts that are captured: steps of 4 up to 32, then of about a quarter of the last, up to most.

    Rows that nobody needs cost little beside reading the weights, a capture costs several steps.
    """
    rungs = [4]
    while rungs[-1] < most:
        rungs.append(rungs[-1] + max(4, rungs[-1] // 32 * 8))
    return [rung for rung in rungs if rung < most] + [most]


class GraphedStep:
    """A step that is captured, so that a small model's costs its arithmetic, and not the calls that lead there.

    A captured step is done again for every later one of its size. On CUDA the first steps of a size run as they are:
    they compile kernels and make workspaces, and a size that few steps have is not worth a capture. On a CPU a step is
    recorded as it runs. A model that cannot be captured goes on uncaptured, in later rollouts too.

    Attributes:
        step: what is captured.
    """

    def __init__(self, step: Step, *, memory: object = None) -> None:
        """Take a step; memory: of CUDA graphs, see graph.capture."""
        self.step = step
        self._sizes = graph_batch_sizes(step.slots.count)
        self._uncaptured_runs: Counter[int] = Counter()  # of each size
        self._graphs: dict[int, CapturedGraph | Recording] = {}
        self._records = True
        self._memory = memory

    @property
    def nbytes(self) -> int:
        """What the captured sizes hold."""
        return sum(graph.nbytes for graph in self._graphs.values())

    def __call__(self, count: int) -> None:
        size = next(size for size in self._sizes if size >= count)
        if size in self._graphs:
            self._replay(size)
        elif self.step.slots.tokens.is_cuda:
            self._run_or_capture(size)
        else:
            self._run_or_record(size)

    def _replay(self, size: int) -> None:
        graph = self._graphs[size]
        graph() if isinstance(graph, Recording) else graph.replay()

    def _run_or_record(self, size: int) -> None:
        if not self._records:
            self.step(size)
            return
        recording = record(lambda: self.step(size))
        self._records = recording is not None
        if recording is not None:
            self._graphs[size] = recording

    def _run_or_capture(self, size: int) -> None:
        if self.step.model.capture_failure is not None or self._uncaptured_runs[size] < RUNS_BEFORE_CAPTURE:
            self._uncaptured_runs[size] += 1
            self.step(size)
            return
        try:
            self._graphs[size] = graph.capture(lambda: self.step(size), memory=self._memory)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.step.model.capture_failure = str(error)
            warnings.warn(f"a decoding step cannot be captured, it is launched kernel by kernel: {error}", stacklevel=2)
            self.step(size)
            return
        self._replay(size)  # capturing alone has run nothing
