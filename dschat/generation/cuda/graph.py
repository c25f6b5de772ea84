"""Capture of a function's CUDA work as a graph; a capture that fails leaves the process as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class CapturedGraph:
    """A graph that can be launched.

    Attributes:
        replay: launches it on the current stream.
        nbytes: device memory that the capture reserved.
    """

    replay: Callable[[], None]
    nbytes: int


def capture(run: Callable[[], None], *, memory: Any, cuda: Any = torch.cuda) -> CapturedGraph:
    """Capture what a function launches; nothing of it runs before the graph is launched.

    Args:
        run: is called once; it must not wait for the device.
        memory: a handle of torch.cuda.graph_pool_handle; graphs that never overlap may share one.
        cuda: torch.cuda, or what stands in for it.

    Raises:
        RuntimeError: the function cannot be captured. The current stream is the one from before.
        torch.OutOfMemoryError: there is no room for the function's tensors.
    """
    graph = cuda.CUDAGraph()
    cuda.empty_cache()  # as torch.cuda.graph does, so that the difference is the graph's own
    reserved = cuda.memory_reserved()
    try:
        with _current_stream_kept(cuda), cuda.graph(graph, pool=memory):
            run()
    except RuntimeError as error:
        if isinstance(error.__context__, torch.OutOfMemoryError):  # hidden by the end of the capture that it broke
            raise error.__context__ from None
        raise
    return CapturedGraph(graph.replay, max(0, cuda.memory_reserved() - reserved))


@contextmanager
def _current_stream_kept(cuda: Any) -> Iterator[None]:
    """torch.cuda.graph leaves its own stream current where it cannot begin or end a capture."""
    stream = cuda.current_stream()
    try:
        yield
    finally:
        cuda.set_stream(stream)
