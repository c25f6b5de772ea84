"""The hybrid engine: one decoder for any causal language model, and the switch between training and generation."""

from dschat.generation.decoder import Decoder
from dschat.generation.hybrid_engine import HybridEngine
from dschat.generation.rollout import Rollout
from dschat.generation.sampling import SamplingParams
from dschat.generation.transformers_decoder import TransformersDecoder

__all__ = ["Decoder", "HybridEngine", "Rollout", "SamplingParams", "TransformersDecoder"]
