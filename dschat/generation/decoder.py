"""Decoder: generation for any causal language model by continuous batching over a KV pool."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dschat.distributed import watchdog
from dschat.generation.cpu.fused_linear import FusedLinears, bf16_kernels, layers_by_input
from dschat.generation.hf_cache_decoder import cache_mismatch, hf_cache_steps
from dschat.generation.kv_pool.pooled_model import PooledModel
from dschat.generation.pool_decoder import PoolDecoder
from dschat.generation.request import Request, Responses
from dschat.generation.rollout import Rollout
from dschat.models.cpu.fused_modules import fused_forwards

# Optimisations that can be disabled, for ablations and debugging.
OPTIMIZATIONS = frozenset({"sharing", "compaction", "kernels", "fusion", "graphs"})
# A KV pool, response buffers and captured steps below this size in total are kept between contexts even without pinned
# buffers: training can spare the memory, and small models avoid a new capture for every rollout.
MAX_KEPT_BYTES = 256 << 20


class Decoder:
    """Generates with a model as given: the caller provides eval mode, full (unpartitioned) weights and no adapters.

    Models whose attention goes through transformers' AttentionInterface decode over a KV pool; others fall back to the
    slower padded-batch loop of hf_cache_decoder, with one warning.

    Attributes:
        prefilled_tokens: prompt tokens prefilled so far; a prompt shared by several samples counts once.
        decoded_rows: rows run so far, summed over decoding steps without prefill: the cost of decoding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int | None = None,
        memory_fraction: float = 0.8,
        without: Collection[str] = (),
    ) -> None:
        """Wrap a model.

        Args:
            slots: maximum rows decoded at once; None: as many as memory allows.
            memory_fraction: share of the free memory that the KV pool may use, in (0, 1].
            without: names from OPTIMIZATIONS to disable.

        Raises:
            ValueError: a number out of range, or an unknown name in `without`.
        """
        problems = []
        if slots is not None and slots < 1:
            problems.append(f"slots is {slots}, but it must be ≥ 1, or None for as many as memory allows")
        if not 0 < memory_fraction <= 1:
            problems.append(f"memory_fraction is {memory_fraction}, but it must be in (0, 1]")
        if set(without) - OPTIMIZATIONS:
            unknown = sorted(set(without) - OPTIMIZATIONS)
            problems.append(f"without has unknown names {unknown}: choose from {', '.join(sorted(OPTIMIZATIONS))}")
        if problems:
            raise ValueError("; ".join(problems) + ".")
        self.model = model
        self._pooled = PooledModel(model)
        self.prefilled_tokens = 0
        self.decoded_rows = 0
        self._options = {"slots": slots, "memory_fraction": memory_fraction, "without": frozenset(without)}
        self._pool_decoder: PoolDecoder | None = None
        self._responses: Responses | None = None
        self._fixed_weights = False
        self._uses_pool: bool | None = None
        self._uses_hf_cache = False
        self._fused_forwards: dict[nn.Module, Callable] | None = None
        self._fused: list[FusedLinears] = []

    def generate(self, prompts: Sequence[Sequence[int]], **request: Any) -> Rollout:
        """Generate one response per prompt; keyword arguments are the fields of Request.

        Raises:
            ValueError: an empty prompt, a number out of range, or more tokens than the model has positions.
        """
        validated = Request(prompts=prompts, **request)
        validated.check(self.model.config)
        return self.run(validated)

    def run(self, request: Request) -> Rollout:
        """Generate for a validated request."""
        responses = self._new_responses(request)
        for _ in self._steps(request, responses):
            watchdog.progress()
        rollout = responses.rollout(request)
        self._responses = responses  # captured steps write to these tensors
        return rollout

    def stream(self, prompt: Sequence[int], *, sample_id: int = 0, **request: Any) -> Iterator[int]:
        """Yield the tokens that generate() would return for this prompt as they are generated, EOS included."""
        validated = Request(prompts=[prompt], pad_token_id=0, sample_ids=torch.tensor([sample_id]), **request)
        validated.check(self.model.config)
        responses, yielded = self._new_responses(validated), 0
        for generated in self._steps(validated, responses, streams=True):
            responses.require_finite(yielded, generated)
            yield from responses.tokens[1 + yielded : 1 + generated].tolist()
            yielded = generated
        self._responses = responses

    @property
    def _device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    def _new_responses(self, request: Request) -> Responses:
        """Empty response buffers, reusing the last ones if large enough: captured steps write to those addresses.

        While they are in use (an open stream), another request gets its own.
        """
        last, self._responses = self._responses, None
        return Responses(request, self._device, reuse=last)

    @torch.inference_mode()
    def _steps(self, request: Request, responses: Responses, *, streams: bool = False) -> Iterator[int]:
        """Decode; yields the first row's token count after each host synchronisation."""
        if self._check_pool():
            if self._pool_decoder is None:
                self._pool_decoder = PoolDecoder(self._pooled, **self._options)
            # An open stream has exclusive use of the pool, so a second request gets its own.
            busy = self._pool_decoder.busy
            pool_decoder = PoolDecoder(self._pooled, **self._options) if busy else self._pool_decoder
            weights = self._weight_addresses() if self._fixed_weights else None
            yield from pool_decoder.steps(request, responses, self, weights=weights, streams=streams)
        else:
            yield from hf_cache_steps(
                self.model, request, responses, self, slots=self._options["slots"], cached=self._uses_hf_cache
            )

    def _check_pool(self) -> bool:
        """Whether the KV pool reproduces the model's own logits; tested once, on a few tokens."""
        if self._uses_pool is None:
            problem = self._pooled.mismatch()
            self._uses_pool = problem is None
            if problem:
                cache_problem = cache_mismatch(self.model)
                self._uses_hf_cache = cache_problem is None
                no_cache_note = f": every token recomputes the whole row ({cache_problem})"
                warnings.warn(
                    f"{type(self.model).__name__} is decoded without the KV pool: {problem}. Results are correct, but "
                    f"decoding is slow{'' if self._uses_hf_cache else no_cache_note}. Each sample of a prompt has "
                    "its own cache, and queued rows start only when the whole batch has ended.",
                    stacklevel=2,
                )
        return self._uses_pool

    def prepare(self) -> None:
        """Install fused modules and packed weights; the weights must not change until `unprepare`."""
        self._fixed_weights = True
        if "fusion" in self._options["without"]:
            return
        if self._fused_forwards is None:
            self._fused_forwards = fused_forwards(self.model)
            library = bf16_kernels(self.model)
            groups = layers_by_input(self.model) if library else []
            self._fused = [FusedLinears(group, library) for group in groups]
        for module, forward in self._fused_forwards.items():
            module.forward = forward
        for fused in self._fused:
            fused.pack_weights()

    def _weight_addresses(self) -> tuple[int, ...]:
        """Addresses of all parameters, buffers and packed copies that a step reads."""
        packed = [tensor for fused in self._fused for tensor in (fused.packed, fused.bias) if tensor is not None]
        return tuple(tensor.data_ptr() for tensor in (*self.model.parameters(), *self.model.buffers(), *packed))

    def unprepare(self, *, keep: bool = False) -> None:
        """Undo `prepare`; keep: keep the packed buffers allocated for the next time.

        The pool and captured steps are kept in either case while they are small: see MAX_KEPT_BYTES.
        """
        self._fixed_weights = False
        if not keep and (self._fused or self._kept_bytes() > MAX_KEPT_BYTES):
            self.release()
        for fused in self._fused:
            fused.release(keep=keep)
        for module in self._fused_forwards or ():
            vars(module).pop("forward", None)

    def _kept_bytes(self) -> float:
        """Bytes kept for the next request; infinite while a stream is open."""
        if self._pool_decoder is None:
            return 0
        responses = 0 if self._responses is None else self._responses.nbytes
        return math.inf if self._pool_decoder.busy else self._pool_decoder.nbytes + responses

    def release(self) -> None:
        """Free the pool, the captured steps and the response buffers."""
        self._pool_decoder = self._responses = None
