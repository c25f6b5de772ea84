"""Rollout engines: the hybrid engine with its decoder for any causal language model, transformers' `generate`, vLLM."""

from collections.abc import Callable

from torch import nn

from dschat.generation.decoder import Decoder
from dschat.generation.hybrid_engine import HybridEngine
from dschat.generation.rollout import Rollout
from dschat.generation.rollout_engine import Capabilities, EngineSettings, RolloutEngine
from dschat.generation.sampling import SamplingParams
from dschat.generation.transformers_decoder import TransformersDecoder
from dschat.generation.transformers_engine import TransformersEngine


def _vllm(policy: nn.Module, settings: EngineSettings) -> RolloutEngine:
    from dschat.generation.vllm.engine import VLLMEngine  # vLLM's modules are optional

    return VLLMEngine(
        policy, settings.vllm, max_tokens=settings.max_tokens, seed=settings.seed,
        check_every=settings.rollouts.check_rollouts_every,
    )  # fmt: skip


# --rollout_engine: (policy, settings) → engine.
ROLLOUT_ENGINES: dict[str, Callable[[nn.Module, EngineSettings], RolloutEngine]] = {
    "hybrid": lambda policy, settings: HybridEngine(policy, **settings.decoding),
    "transformers": lambda policy, settings: TransformersEngine(policy, **settings.decoding),
    "vllm": _vllm,
}

__all__ = [
    "Capabilities",
    "Decoder",
    "EngineSettings",
    "HybridEngine",
    "ROLLOUT_ENGINES",
    "Rollout",
    "RolloutEngine",
    "SamplingParams",
    "TransformersDecoder",
    "TransformersEngine",
]
