"""Rollouts by transformers' own `generate`: slower than the hybrid engine; the reference for its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from dschat.generation.generation_module import GenerationModule
from dschat.generation.rollout import Rollout
from dschat.generation.rollout_engine import Capabilities
from dschat.generation.transformers_decoder import TransformersDecoder
from dschat.models.weights import pretrained_model


class TransformersEngine:
    """Generates with the weights that are being trained, which are gathered as in HybridEngine.

    Args:
        engine: a DeepSpeedEngine around TokenLogprobs, a TokenLogprobs, or the Hugging Face model.
        slots: rows decoded at once; None: all of them.
        memory_fraction, pin_buffers: for weights that must be copied, see HybridEngine.
    """

    capabilities = Capabilities(streams=False, reproducible=True)

    def __init__(
        self, engine: nn.Module, *, slots: int | None = None, memory_fraction: float = 0.8, pin_buffers: bool = False
    ) -> None:
        self._generation_module = GenerationModule(
            pretrained_model(engine), pin=pin_buffers, memory_fraction=memory_fraction
        )
        self._decoder = TransformersDecoder(self._generation_module.module, slots=slots)
        self._generating = False

    @contextmanager
    def generation(self) -> Iterator[TransformersEngine]:
        """Hold full (unpartitioned) weights for the duration of the context; under ZeRO-3 entering is a collective.

        Raises:
            RuntimeError: entered twice.
        """
        if self._generating:
            raise RuntimeError("generation() is already entered: exit the outer context first.")
        self._generating = True
        try:
            self._generation_module.load_weights()
            yield self
        finally:
            self._generation_module.release()
            self._generating = False

    def generate(self, prompts: Sequence[Sequence[int]], **request: Any) -> Rollout:
        """Generate one response per prompt, inside generation(). Keyword arguments are the fields of Request.

        Raises:
            RuntimeError: called outside generation().
            ValueError: see Decoder.generate and SamplingParams.
        """
        if not self._generating:
            raise RuntimeError("generate() needs the gathered weights: with engine.generation(): engine.generate(...).")
        return self._decoder.generate(prompts, **request)
