"""Rollout engine: decoders for causal language models, and the hybrid engine that switches training to generation."""

from dschat.generation.decoder import Decoder
from dschat.generation.hybrid_engine import HybridEngine
from dschat.generation.rollout import Rollout
from dschat.generation.sampling import SamplingParams
from dschat.generation.transformers_decoder import TransformersDecoder

__all__ = ["Decoder", "HybridEngine", "Rollout", "SamplingParams", "TransformersDecoder"]
