"""One object that switches a model between training and generation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dschat.generation.decoder import Decoder
from dschat.generation.generation_module import GenerationModule
from dschat.generation.rollout import Rollout
from dschat.generation.rollout_engine import Capabilities
from dschat.models.weights import pretrained_model


class HybridEngine:
    """Generates with the weights that are being trained.

        with actor.generation():            # ZeRO-3: every rank enters, the weights are gathered once
            rollout = actor.generate(...)   # no collective inside: ranks decode at their own pace

    On entry a second, plain module borrows the weights (adapters folded in at full strength, dropout off); on
    exit it lets them go. The training module is never written to, so it is bit-identical afterwards, and its
    train/eval mode, hooks and gradient checkpointing stay as they are. Weights that change inside the context may or
    may not be seen: train outside.

    Attributes:
        engine: what was wrapped: a DeepSpeedEngine around TokenLogprobs, a TokenLogprobs, or the Hugging Face model.
        prefilled_tokens, decoded_rows: what all generation so far has run, see Decoder.
    """

    capabilities = Capabilities(streams=True, reproducible=True)

    def __init__(
        self,
        engine: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        slots: int | None = None,
        memory_fraction: float = 0.8,
        pin_buffers: bool = False,
        layerwise: bool | None = None,
        without: Collection[str] = (),
    ) -> None:
        """Wrap an engine or a model.

        Args:
            engine: see the class.
            dtype: of the weights while generating (bfloat16 rollouts of float32 weights cost a copy); None: no change.
            slots, memory_fraction, without: see Decoder.
            pin_buffers: keep the pool of keys and values, and the buffers of weights that had to be copied, from one
                context to the next. Otherwise only what is small is kept, see decoder.KEPT_BYTES.
            layerwise: make copies of weights when their layer runs, where they have to be copied; None: where they do
                not fit into memory_fraction of the free memory. Under ZeRO-3 ranks then decode in step.
        """
        self.engine = engine
        self.pin_buffers = pin_buffers
        self._generation_module = GenerationModule(
            pretrained_model(engine), dtype=dtype, pin=pin_buffers, memory_fraction=memory_fraction, layerwise=layerwise
        )
        self._decoder = Decoder(
            self._generation_module.module, slots=slots, memory_fraction=memory_fraction, without=without
        )
        self._generating = False

    @property
    def prefilled_tokens(self) -> int:
        return self._decoder.prefilled_tokens

    @property
    def decoded_rows(self) -> int:
        return self._decoder.decoded_rows

    @contextmanager
    def generation(self) -> Iterator[HybridEngine]:
        """Hold full-size weights for as long as the context lasts.

        Under ZeRO-3 entering is a collective; nothing else is. An exception inside releases the weights as well.

        Raises:
            RuntimeError: entered twice.
        """
        if self._generating:
            raise RuntimeError(
                "generation() is entered inside generation(): the weights are there already, "
                "so call generate() directly, or leave the outer context first."
            )
        self._generating = True
        try:
            self._generation_module.fill()
            if self._generation_module.layerwise is None:
                self._decoder.prepare()
            yield self
        finally:
            self._decoder.unprepare(keep=self.pin_buffers)
            if not self.pin_buffers and self._generation_module.holds_copies:
                self._decoder.release()  # captured steps would keep the copies, which go
            self._generation_module.release()
            self._generating = False

    def generate(self, prompts: Sequence[Sequence[int]], **request: Any) -> Rollout:
        """Decode one response for each prompt, inside generation(). The arguments are those of Request.

        Raises:
            RuntimeError: called outside generation().
            ValueError: see Decoder.generate and SamplingParams.
        """
        self._require_weights("generate")
        return self._decoder.generate(prompts, **request)

    def stream(self, prompt: Sequence[int], *, sample_id: int = 0, **request: Any) -> Iterator[int]:
        """Yield the tokens of one response as they come, the EOS included, inside generation().

        Raises:
            RuntimeError: called outside generation().
            ValueError: see Decoder.generate and SamplingParams; raised with the first token.
        """
        self._require_weights("stream")
        return self._decoder.stream(prompt, sample_id=sample_id, **request)

    def _require_weights(self, call: str) -> None:
        if not self._generating:
            raise RuntimeError(
                f"{call}() needs full-size weights, which are there only inside the context: "
                f"with engine.generation(): engine.{call}(...)."
            )
