"""Decoding of any causal language model: a queue of prompts, slots that decode, one step a token."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dschat.distributed import watchdog
from dschat.generation.cpu.fused_linear import FusedLinears, fusable, shared_inputs
from dschat.generation.cpu.fused_modules import faster_forwards
from dschat.generation.hf_cache_decoder import cache_mismatch, hf_cache_steps
from dschat.generation.kv_pool import PooledModel
from dschat.generation.request import Request, Responses
from dschat.generation.rollout import Rollout
from dschat.generation.scheduler import Rollouts

# What can be switched off, to see what it brings.
PARTS = frozenset({"sharing", "compaction", "kernels", "fusion", "graphs"})
# A pool, its tables and captured steps that together take less than this are kept between contexts although no buffers
# are pinned: training does not miss them, and a small model's steps would be captured anew for every rollout.
KEPT_BYTES = 256 << 20


class Decoder:
    """Decodes with a model as it stands: the caller sees to eval mode, full-size weights and no adapters.

    A model whose attention goes through transformers' AttentionInterface is decoded over a pool of keys and values; any
    other by a plain loop, which is slower and says so once.

    Attributes:
        prefilled_tokens: prompt tokens run so far; a prompt that several samples share counts once.
        decoded_rows: rows fed so far, summed over steps, prefill apart: what decoding has cost.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int | None = None,
        memory_fraction: float = 0.8,
        without: Collection[str] = (),
    ) -> None:
        """Take a model.

        Args:
            slots: most rows decoded at once; None: as many as memory allows.
            memory_fraction: share of the free memory that keys and values may take, in (0, 1].
            without: names of PARTS to switch off, to see what they bring.

        Raises:
            ValueError: a number out of range, or a part that does not exist.
        """
        problems = []
        if slots is not None and slots < 1:
            problems.append(f"slots is {slots}, but it counts rows: use ≥ 1, or None for as many as memory allows")
        if not 0 < memory_fraction <= 1:
            problems.append(f"memory_fraction is {memory_fraction}, but it is a share in (0, 1]")
        if set(without) - PARTS:
            problems.append(f"without names {sorted(set(without) - PARTS)}: there are {', '.join(sorted(PARTS))}")
        if problems:
            raise ValueError("; ".join(problems) + ".")
        self.model = model
        self._pooled = PooledModel(model)
        self.prefilled_tokens = 0
        self.decoded_rows = 0
        self._options = {"slots": slots, "memory_fraction": memory_fraction, "without": frozenset(without)}
        self._rollouts: Rollouts | None = None
        self._responses: Responses | None = None
        self._fixed_weights = False
        self._served: bool | None = None
        self._cached = False
        self._faster: dict[nn.Module, Callable] | None = None
        self._fused: list[FusedLinears] = []

    def generate(self, prompts: Sequence[Sequence[int]], **request: Any) -> Rollout:
        """Decode one response for each prompt; the arguments are those of Request.

        Raises:
            ValueError: an empty prompt, a number out of range, or more tokens than the model has positions.
        """
        wanted = Request(prompts=prompts, **request)
        wanted.check(self.model.config)
        return self.run(wanted)

    def run(self, request: Request) -> Rollout:
        """Decode a request that has been checked."""
        responses = self._new_responses(request)
        for _ in self._steps(request, responses):
            watchdog.progress()
        rollout = responses.rollout(request)
        self._responses = responses  # its tensors are where graphs write
        return rollout

    def stream(self, prompt: Sequence[int], *, sample_id: int = 0, **request: Any) -> Iterator[int]:
        """Yield the tokens that generate() would return for this one prompt as they come, the EOS included."""
        wanted = Request(prompts=[prompt], pad_token_id=0, sample_ids=torch.tensor([sample_id]), **request)
        wanted.check(self.model.config)
        responses, told = self._new_responses(wanted), 0
        for drawn in self._steps(wanted, responses, streams=True):
            responses.require_finite(told, drawn)
            yield from responses.tokens[1 + told : 1 + drawn].tolist()
            told = drawn
        self._responses = responses

    @property
    def _device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    def _new_responses(self, request: Request) -> Responses:
        """An empty table, at the place of the last one where that is large enough: captured steps write there.

        As long as it is in use, a second request (beside an open stream) gets one of its own.
        """
        last, self._responses = self._responses, None
        return Responses(request, self._device, reuse=last)

    @torch.inference_mode()
    def _steps(self, request: Request, responses: Responses, *, streams: bool = False) -> Iterator[int]:
        """Decode; after each look of the host, the tokens that the first row has so far."""
        if self._serves():
            if self._rollouts is None:
                self._rollouts = Rollouts(self._pooled, **self._options)
            # A stream that is still open has the pool for itself.
            rollouts = Rollouts(self._pooled, **self._options) if self._rollouts.busy else self._rollouts
            weights = self._weight_addresses() if self._fixed_weights else None
            yield from rollouts.steps(request, responses, self, weights=weights, streams=streams)
        else:
            yield from hf_cache_steps(
                self.model, request, responses, self, slots=self._options["slots"], cached=self._cached
            )

    def _serves(self) -> bool:
        """Whether the pool gives what the model's own forward gives; tried once, on a few tokens."""
        if self._served is None:
            problem = self._pooled.mismatch()
            self._served = problem is None
            if problem:
                without_cache = cache_mismatch(self.model)
                self._cached = without_cache is None
                again = f": every token runs all columns again ({without_cache})"
                warnings.warn(
                    f"{type(self.model).__name__} is decoded by a plain loop: {problem}. Results are right, decoding "
                    f"is slow{'' if self._cached else again}. Prompts are not shared, and rows wait for their batch.",
                    stacklevel=2,
                )
        return self._served

    def prepare(self) -> None:
        """Make of the weights what runs fastest; they must not change until `unprepare`."""
        self._fixed_weights = True
        if "fusion" in self._options["without"]:
            return
        if self._faster is None:
            self._faster = faster_forwards(self.model)
            library = fusable(self.model)
            groups = shared_inputs(self.model) if library else []
            self._fused = [FusedLinears(group, library) for group in groups]
        for module, forward in self._faster.items():
            module.forward = forward
        for fused in self._fused:
            fused.take()

    def _weight_addresses(self) -> tuple[int, ...]:
        """Of everything that a step reads of the model, packed copies included."""
        packed = [tensor for fused in self._fused for tensor in (fused.packed, fused.bias) if tensor is not None]
        return tuple(tensor.data_ptr() for tensor in (*self.model.parameters(), *self.model.buffers(), *packed))

    def unprepare(self, *, keep: bool = False) -> None:
        """Let go of what `prepare` made; keep: the buffers stay, for the next time.

        The pool and captured steps stay in either case, as long as they are small: see KEPT_BYTES.
        """
        self._fixed_weights = False
        if not keep and (self._fused or self._kept_bytes() > KEPT_BYTES):
            self.release()
        for fused in self._fused:
            fused.release(keep=keep)
        for module in self._faster or ():
            vars(module).pop("forward", None)

    def _kept_bytes(self) -> float:
        """What is held for the next request; infinite while a stream is still open."""
        if self._rollouts is None:
            return 0
        responses = 0 if self._responses is None else self._responses.nbytes
        return math.inf if self._rollouts.busy else self._rollouts.nbytes + responses

    def release(self) -> None:
        """Let go of the pool, of graphs, and of where they write."""
        self._rollouts = self._responses = None
