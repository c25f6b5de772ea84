"""Captured decoding steps, kept from one request to the next while the tensors that they use stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dschat.generation.step import GraphedStep

# Kinds of requests (sampled, greedy, an evaluation, …) whose steps are kept; the one unused for longest goes first.
MOST_KINDS = 4


@dataclass
class CapturedSteps:
    """A step for each kind of request.

    All of them use the same weights, the same pool of keys and values and the same tables of responses: once these lie
    elsewhere, every recording is void.
    """

    _addresses: Hashable = None
    _kinds: dict[Hashable, GraphedStep] = field(default_factory=dict)

    def get(self, kind: Hashable, addresses: Hashable, make: Callable[[], GraphedStep]) -> GraphedStep:
        """The step for this kind of request, with what was captured before where that is still valid.

        Args:
            kind: everything that a captured step has as a constant.
            addresses: of everything outside the step that it reads and writes.
            make: a new step.
        """
        if addresses != self._addresses:
            self._kinds.clear()
            self._addresses = addresses
        step = self._kinds.pop(kind, None)
        if step is None:
            if len(self._kinds) >= MOST_KINDS:
                del self._kinds[next(iter(self._kinds))]
            step = make()
        self._kinds[kind] = step  # behind all others: the newest
        return step

    def clear(self) -> None:
        """Free all captured steps."""
        self._kinds.clear()
        self._addresses = None

    @property
    def nbytes(self) -> int:
        """What the captured steps hold."""
        return sum(step.nbytes for step in self._kinds.values())
