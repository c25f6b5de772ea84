"""One object that switches a model between training and generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dschat.generation.decoder import Decoder
from dschat.generation.generation_module import GenerationModule
from dschat.generation.rollout import Rollout
from dschat.generation.sampling import SamplingParams
from dschat.generation.transformers_decoder import TransformersDecoder
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

    def __init__(
        self,
        engine: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        decoder: type[Decoder] | type[TransformersDecoder] = Decoder,
    ) -> None:
        """Wrap an engine or a model.

        Args:
            engine: see the class.
            dtype: of the weights while generating (bfloat16 rollouts of float32 weights cost a copy); None: no change.
            decoder: what runs the tokens; TransformersDecoder neither streams nor counts what it has run.
        """
        self.engine = engine
        self._generation_module = GenerationModule(pretrained_model(engine), dtype=dtype)
        self._decoder = decoder(self._generation_module.module)
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
            yield self
        finally:
            self._generation_module.release()
            self._generating = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_ids: int | Sequence[int] | None,
        pad_token_id: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        iteration: int = 0,
        sample_ids: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Rollout:
        """Decode one response for each prompt, inside generation(). Arguments: Decoder.generate and SamplingParams.

        Raises:
            RuntimeError: called outside generation().
            ValueError: see Decoder.generate and SamplingParams.
        """
        self._require_weights("generate")
        return self._decoder.generate(
            prompts,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
            pad_token_id=pad_token_id,
            sampling=SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p),
            seed=seed,
            iteration=iteration,
            sample_ids=sample_ids,
            batch_size=batch_size,
        )

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        eos_token_ids: int | Sequence[int] | None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        iteration: int = 0,
        sample_id: int = 0,
    ) -> Iterator[int]:
        """Yield the tokens of one response as they come, the EOS included, inside generation().

        Raises:
            RuntimeError: called outside generation().
            ValueError: see Decoder.generate and SamplingParams; raised with the first token.
        """
        self._require_weights("stream")
        return self._decoder.stream(
            prompt,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
            sampling=SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p),
            seed=seed,
            iteration=iteration,
            sample_id=sample_id,
        )

    def _require_weights(self, call: str) -> None:
        if not self._generating:
            raise RuntimeError(
                f"{call}() needs full-size weights, which are there only inside the context: "
                f"with engine.generation(): engine.{call}(...)."
            )
