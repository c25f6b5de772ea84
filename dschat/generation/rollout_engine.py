"""Interface of the engines that generate rollouts for step 3; ROLLOUT_ENGINES in the package lists them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from dschat.arguments import RolloutArguments, VLLMArguments
from dschat.generation.rollout import Rollout


@dataclass(frozen=True)
class Capabilities:
    """Optional capabilities of an engine.

    Attributes:
        streams: yields the tokens of a response as they are decoded (`stream`).
        reproducible: the same seed and sample ids give the same tokens, whatever else is in the batch.
        separate_weights: has its own weights, which the policy's are loaded into.
        same_weights: samples with the policy's weights in their dtype, not with quantised ones.
        keeps_conversations: keeps the keys and values of a conversation between its turns.
    """

    streams: bool
    reproducible: bool
    separate_weights: bool = False
    same_weights: bool = True
    keeps_conversations: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What engines are built from.

    Attributes:
        rollouts, vllm: the flags.
        seed: of the run.
    """

    rollouts: RolloutArguments = field(default_factory=RolloutArguments)
    vllm: VLLMArguments = field(default_factory=VLLMArguments)
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        """Of the longest prompt and response."""
        return self.rollouts.max_prompt_seq_len + self.rollouts.max_answer_seq_len

    @property
    def decoding(self) -> dict[str, Any]:
        """Arguments of the engines that decode with the policy's own modules."""
        return {
            "slots": self.rollouts.generation_slots or None,
            "memory_fraction": self.rollouts.generation_memory_fraction,
            "pin_buffers": self.rollouts.pin_generation_buffers,
        }


class RolloutEngine(Protocol):
    """Generates with the current weights of one policy."""

    capabilities: Capabilities

    def generation(self) -> AbstractContextManager[Any]:
        """Load the current weights for the context; memory is released on exit. All ranks must enter."""

    def generate(self, prompts: Sequence[Sequence[int]], **request: Any) -> Rollout:
        """Generate one response per prompt, inside generation(). Keyword arguments are the fields of Request."""
