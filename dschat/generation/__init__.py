"""Rollout engines: the hybrid engine with its decoder for any causal language model, and transformers' `generate`."""

from collections.abc import Callable

from dschat.generation.decoder import Decoder
from dschat.generation.hybrid_engine import HybridEngine
from dschat.generation.rollout import Rollout
from dschat.generation.rollout_engine import Capabilities, RolloutEngine
from dschat.generation.sampling import SamplingParams
from dschat.generation.transformers_decoder import TransformersDecoder
from dschat.generation.transformers_engine import TransformersEngine

# --rollout_engine: (policy, slots=, memory_fraction=, pin_buffers=) → engine.
ROLLOUT_ENGINES: dict[str, Callable[..., RolloutEngine]] = {
    "hybrid": HybridEngine,
    "transformers": TransformersEngine,
}

__all__ = [
    "Capabilities",
    "Decoder",
    "HybridEngine",
    "ROLLOUT_ENGINES",
    "Rollout",
    "RolloutEngine",
    "SamplingParams",
    "TransformersDecoder",
    "TransformersEngine",
]
