"""CUDA graph capture of a function; a failed capture restores the current stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class CapturedGraph:
    """A captured CUDA graph.

    Attributes:
        replay: launches the graph on the current stream.
        nbytes: device memory reserved by the capture.
    """

    replay: Callable[[], None]
    nbytes: int


def capture(run: Callable[[], None], *, memory: Any, cuda: Any = torch.cuda) -> CapturedGraph:
    """Capture the kernels that a function launches; they run only when the graph is replayed.

    Args:
        run: called once; it must not synchronise with the device.
        memory: from torch.cuda.graph_pool_handle(); graphs that never run concurrently may share one.
        cuda: torch.cuda, or a substitute for tests.

    Raises:
        RuntimeError: the function cannot be captured. The current stream is restored.
        torch.OutOfMemoryError: not enough memory for the function's tensors.
    """
    graph = cuda.CUDAGraph()
    cuda.empty_cache()  # as torch.cuda.graph does; the difference below is then the graph's memory
    reserved = cuda.memory_reserved()
    try:
        with _restored_stream(cuda), cuda.graph(graph, pool=memory):
            run()
    except RuntimeError as error:
        if isinstance(error.__context__, torch.OutOfMemoryError):  # masked by the error of ending the broken capture
            raise error.__context__ from None
        raise
    return CapturedGraph(graph.replay, max(0, cuda.memory_reserved() - reserved))


@contextmanager
def _restored_stream(cuda: Any) -> Iterator[None]:
    """Restore the current stream: torch.cuda.graph leaves its own current if a capture fails to begin or end."""
    stream = cuda.current_stream()
    try:
        yield
    finally:
        cuda.set_stream(stream)
