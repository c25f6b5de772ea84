"""One decoding step on tensors with fixed addresses, and its capture as a CUDA graph or CPU recording."""

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
from dschat.generation.kv_pool.pool import KVPool
from dschat.generation.kv_pool.pooled_model import PooledModel
from dschat.generation.request import Responses
from dschat.generation.sampling import SamplingParams

# A capture costs about as much as this many uncaptured steps. Capturing after that many costs at most twice the optimum
# (ski-rental rule).
RUNS_BEFORE_CAPTURE = 4


@dataclass(frozen=True)
class Step:
    """Generates one token for each active slot: forward, sample, store, update ended rows, all on the device.

    Attributes:
        model, pool, batch, responses: the state read and written.
        sampling, stop_ids: sampling parameters; [n] long ids that end a row.
        longest: upper bound of the context length.
        kernels: use the C++ or Triton kernels where available.
        allow_host_sync: sampling may synchronise with the device where that saves work.
    """

    model: PooledModel
    pool: KVPool
    batch: DecodeBatch
    responses: Responses
    sampling: SamplingParams
    stop_ids: Tensor
    longest: int
    kernels: bool = True
    allow_host_sync: bool = True

    def __call__(self, count: int) -> None:
        """Run the first `count` slots; empty ones run a dummy token whose output is ignored."""
        tokens, spans = self.batch.advance(count)
        logits = self.model.decode(self.pool, tokens, spans, longest=self.longest)  # [R, V]
        self.draw(slice(0, count), logits)

    def draw(self, slots: slice, logits: Tensor) -> None:
        """Sample the next token of some slots from logits [n, V]."""
        uniform = None
        if self.responses.uniforms is not None:
            uniform = self.responses.uniforms[self.batch.write_indices(slots, self.responses)]
        tokens, logprobs = draw_tokens(
            logits, uniform, self.sampling, kernels=self.kernels, allow_host_sync=self.allow_host_sync
        )
        self.batch.write(slots, tokens, logprobs, self.responses, self.stop_ids)


def graph_batch_sizes(max_size: int) -> list[int]:
    """Batch sizes to capture: multiples of 4 up to 32, then growing by about a quarter, up to `max_size`.

    A batch is padded to the next size: padding rows are cheap next to reading the weights, captures are not.
    """
    sizes = [4]
    while sizes[-1] < max_size:
        sizes.append(sizes[-1] + max(4, sizes[-1] // 32 * 8))
    return [size for size in sizes if size < max_size] + [max_size]


class GraphedStep:
    """Captures a step per batch size and replays it, which removes kernel-launch and Python overhead.

    On CUDA the first steps of a size run uncaptured: they compile kernels and allocate workspaces, and rare sizes are
    not worth a capture. On a CPU the step is recorded as it runs. A model whose step cannot be captured runs
    uncaptured from then on, in later rollouts too.

    Attributes:
        step: the step to capture.
    """

    def __init__(self, step: Step, *, memory: object = None) -> None:
        """Wrap a step; memory: the CUDA graph memory pool, see graph.capture."""
        self.step = step
        self._sizes = graph_batch_sizes(step.batch.count)
        self._uncaptured_runs: Counter[int] = Counter()  # per batch size
        self._graphs: dict[int, CapturedGraph | Recording] = {}
        self._can_record = True
        self._memory = memory

    @property
    def nbytes(self) -> int:
        """Bytes held by all captures."""
        return sum(graph.nbytes for graph in self._graphs.values())

    def __call__(self, count: int) -> None:
        size = next(size for size in self._sizes if size >= count)
        if size in self._graphs:
            self._replay(size)
        elif self.step.batch.tokens.is_cuda:
            self._run_or_capture(size)
        else:
            self._run_or_record(size)

    def _replay(self, size: int) -> None:
        graph = self._graphs[size]
        graph() if isinstance(graph, Recording) else graph.replay()

    def _run_or_record(self, size: int) -> None:
        if not self._can_record:
            self.step(size)
            return
        recording = record(lambda: self.step(size))
        self._can_record = recording is not None
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
            warnings.warn(f"a decoding step cannot be captured and runs without a CUDA graph: {error}", stacklevel=2)
            self.step(size)
            return
        self._replay(size)  # a CUDA capture does not execute the step
