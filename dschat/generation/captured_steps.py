"""Cache of captured decoding steps, valid across requests while the tensors they use keep their addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dschat.generation.step import GraphedStep

# Kinds of requests (sampled, greedy, evaluation, …) whose steps are cached; the least recently used is evicted.
MAX_KINDS = 4


@dataclass
class CapturedSteps:
    """LRU cache with one captured step per kind of request.

    All steps use the same weights, KV pool and response buffers: if any of these moves, all captures are dropped.
    """

    _addresses: Hashable = None
    _steps: dict[Hashable, GraphedStep] = field(default_factory=dict)

    def get(self, kind: Hashable, addresses: Hashable, make: Callable[[], GraphedStep]) -> GraphedStep:
        """Return the cached step for this kind of request if still valid, else a new one.

        Args:
            kind: everything that is a constant of a captured step.
            addresses: of all external tensors that the step reads and writes.
            make: creates a new step.
        """
        if addresses != self._addresses:
            self._steps.clear()
            self._addresses = addresses
        step = self._steps.pop(kind, None)
        if step is None:
            if len(self._steps) >= MAX_KINDS:
                del self._steps[next(iter(self._steps))]
            step = make()
        self._steps[kind] = step  # last: most recently used
        return step

    def clear(self) -> None:
        """Free all captured steps."""
        self._steps.clear()
        self._addresses = None

    @property
    def nbytes(self) -> int:
        """Bytes held by the captured steps."""
        return sum(step.nbytes for step in self._steps.values())
