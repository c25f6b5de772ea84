"""One decoding step, as a function of tensors that stay where they are, and its capture."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.generation.cpu_graph import record
from dschat.generation.draw import draw_tokens
from dschat.generation.kv_pool import KVPool, PooledModel
from dschat.generation.request import Responses
from dschat.generation.sampling import SamplingParams
from dschat.generation.slots import Slots


@dataclass(frozen=True)
class Step:
    """One token for each of the first rows in flight: forward, draw, note, see who has ended. The host takes no part.

    Attributes:
        model, pool, slots, responses: what it reads and writes.
        sampling, stops: how tokens are drawn, and [n] long which of them end a row.
        longest: no context gets longer.
        kernels: use our own kernels where there are some.
        waits: drawing may wait for the device where that saves work.
    """

    model: PooledModel
    pool: KVPool
    slots: Slots
    responses: Responses
    sampling: SamplingParams
    stops: Tensor
    longest: int
    kernels: bool = True
    waits: bool = True

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
        tokens, logprobs = draw_tokens(logits, uniform, self.sampling, kernels=self.kernels, waits=self.waits)
        self.slots.write(places, tokens, logprobs, self.responses, self.stops)


def ladder(most: int) -> list[int]:
    """Row counts that are captured: steps of 4 up to 32, then of about a quarter of the last, up to most.

    Rows that nobody needs cost little beside reading the weights, a capture costs several steps.
    """
    rungs = [4]
    while rungs[-1] < most:
        rungs.append(rungs[-1] + max(4, rungs[-1] // 32 * 8))
    return [rung for rung in rungs if rung < most] + [most]


class GraphedStep:
    """A step that is captured, so that a small model's costs its arithmetic, and not the calls that lead there.

    A captured step is done again for every later one of its size. On CUDA the first of a size runs as it is, since it
    compiles kernels and makes workspaces; on a CPU it is recorded. A model that cannot be captured goes on uncaptured.

    Attributes:
        step: what is captured.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._sizes = ladder(step.slots.count)
        self._seen: set[int] = set()
        self._graphs: dict[int, Callable[[], None]] = {}
        self._captures = True
        self._memory: object = None

    def __call__(self, count: int) -> None:
        size = next(size for size in self._sizes if size >= count)
        if size in self._graphs:
            self._graphs[size]()
        elif not self._captures:
            self.step(size)
        elif self.step.slots.tokens.is_cuda:
            if size in self._seen:
                self._capture(size)
            else:
                self._seen.add(size)
                self.step(size)
        else:
            replay = record(lambda: self.step(size))
            self._captures = replay is not None
            if replay is not None:
                self._graphs[size] = replay

    def _capture(self, size: int) -> None:
        """Capture and run a step; capturing alone runs nothing."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory):  # the graphs share their memory: they never overlap
                self.step(size)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            warnings.warn(f"a decoding step cannot be captured, it is launched kernel by kernel: {error}", stacklevel=2)
            self._captures = False
            self.step(size)
            return
        self._memory = graph.pool()
        self._graphs[size] = graph.replay
        graph.replay()
