"""HybridEngine: generates rollouts with the weights of a model that is being trained."""

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

        with actor.generation():            # ZeRO-3: all ranks enter, the weights are gathered once
            rollout = actor.generate(...)   # no collectives inside: ranks decode independently

    On entry a separate inference module aliases or copies the weights (LoRA folded in, dropout off); on exit it
    releases them. The training module is never modified: parameters stay bit-identical, and train/eval mode, hooks and
    gradient checkpointing are unchanged. Do not update weights inside the context: copies would not be updated.

    Attributes:
        engine: the wrapped DeepSpeedEngine around TokenLogprobs, TokenLogprobs, or Hugging Face model.
        prefilled_tokens, decoded_rows: totals over all generation so far, see Decoder.
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
            engine: see the class attributes.
            dtype: of the weights during generation (bfloat16 rollouts of float32 weights need a copy); None: unchanged.
            slots, memory_fraction, without: see Decoder.
            pin_buffers: keep the KV pool and the buffers of copied weights allocated between contexts. Otherwise only
                small buffers are kept, see decoder.MAX_KEPT_BYTES.
            layerwise: for weights that must be copied, copy each layer's when it runs; None: only if they do not fit
                into memory_fraction of the free memory. Under ZeRO-3 ranks then run their forwards in lockstep.
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
        """Hold full (unpartitioned) weights for the duration of the context.

        Under ZeRO-3 entering is a collective; with layerwise weights, so are forwards and exit. An exception inside
        releases the weights too.

        Raises:
            RuntimeError: entered twice.
        """
        if self._generating:
            raise RuntimeError(
                "generation() is already entered: the weights are loaded, "
                "so call generate() directly, or exit the outer context first."
            )
        self._generating = True
        try:
            self._generation_module.load_weights()
            if self._generation_module.layerwise is None:
                self._decoder.prepare()
            yield self
        finally:
            self._decoder.unprepare(keep=self.pin_buffers)
            if not self.pin_buffers and self._generation_module.holds_copies:
                self._decoder.release()  # captured steps would keep references to the copies
            self._generation_module.release()
            self._generating = False

    def generate(self, prompts: Sequence[Sequence[int]], **request: Any) -> Rollout:
        """Generate one response per prompt, inside generation(). Keyword arguments are the fields of Request.

        Raises:
            RuntimeError: called outside generation().
            ValueError: see Decoder.generate and SamplingParams.
        """
        self._require_weights("generate")
        return self._decoder.generate(prompts, **request)

    def stream(self, prompt: Sequence[int], *, sample_id: int = 0, **request: Any) -> Iterator[int]:
        """Yield the tokens of one response as they are generated, EOS included, inside generation().

        Raises:
            RuntimeError: called outside generation().
            ValueError: see Decoder.generate and SamplingParams; raised with the first token.
        """
        self._require_weights("stream")
        return self._decoder.stream(prompt, sample_id=sample_id, **request)

    def _require_weights(self, call: str) -> None:
        if not self._generating:
            raise RuntimeError(
                f"{call}() needs the gathered weights, which are loaded only inside the context: "
                f"with engine.generation(): engine.{call}(...)."
            )
