"""Contexts of a forward pass that hold again when gradient checkpointing repeats a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar

Context = Callable[[], AbstractContextManager]

_active: ContextVar[tuple[Context, ...]] = ContextVar("forward_contexts", default=())


@contextmanager
def forward_context(*contexts: Context) -> Iterator[None]:
    """Enter contexts for a forward pass.

    Args:
        contexts: each call gives a new context manager; recomputed layers run in others of the same kind.
    """
    token = _active.set(_active.get() + contexts)
    try:
        with _entered(contexts):
            yield
    finally:
        _active.reset(token)


def recompute_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """`context_fn` of torch.utils.checkpoint: layers are recomputed in the contexts of their forward pass."""
    return nullcontext(), _entered(_active.get())


@contextmanager
def _entered(contexts: tuple[Context, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield
