"""What step 3 needs of an engine that generates rollouts; the table of engines is ROLLOUT_ENGINES in the package."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from dschat.generation.rollout import Rollout


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do beside generating.

    Attributes:
        streams: yields the tokens of a response as they are decoded (`stream`).
        reproducible: the same seed and sample ids give the same tokens, whatever else is in the batch.
        keeps_conversations: keeps the keys and values of a conversation between its turns.
    """

    streams: bool
    reproducible: bool
    keeps_conversations: bool = False


class RolloutEngine(Protocol):
    """Generates with the newest weights of the policy that it was made for."""

    capabilities: Capabilities

    def generation(self) -> AbstractContextManager[Any]:
        """Inside, the newest weights are loaded; on exit memory is released. Every rank enters."""

    def generate(self, prompts: Sequence[Sequence[int]], **request: Any) -> Rollout:
        """One response for each prompt, inside generation(). The arguments are those of Request."""
