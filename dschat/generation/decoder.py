"""Decoding of any causal language model: a queue of prompts, slots that decode, one step a token."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dschat.generation.fused_linear import FusedLinears, fusable, shared_inputs
from dschat.generation.fused_modules import faster_forwards
from dschat.generation.kv_pool import PooledModel
from dschat.generation.plain_rows import cache_mismatch, plain_steps
from dschat.generation.request import Request, Responses
from dschat.generation.rollout import Rollout
from dschat.generation.scheduler import Rollouts

# What can be switched off, to see what it brings.
PARTS = frozenset({"sharing", "compaction", "kernels", "fusion", "graphs"})


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
        responses = Responses(request, self._device, reuse=self._responses)
        for _ in self._steps(request, responses):
            pass
        self._responses = responses  # its tensors are where graphs write
        return responses.rollout(request)

    def stream(self, prompt: Sequence[int], *, sample_id: int = 0, **request: Any) -> Iterator[int]:
        """Yield the tokens that generate() would return for this one prompt as they come, the EOS included."""
        wanted = Request(prompts=[prompt], pad_token_id=0, sample_ids=torch.tensor([sample_id]), **request)
        wanted.check(self.model.config)
        responses, told = Responses(wanted, self._device), 0
        for drawn in self._steps(wanted, responses):
            yield from responses.tokens[1 + told : 1 + drawn].tolist()
            told = drawn

    @property
    def _device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @torch.inference_mode()
    def _steps(self, request: Request, responses: Responses) -> Iterator[int]:
        """Decode; after each look of the host, the tokens that the first row has so far."""
        if self._serves():
            if self._rollouts is None:
                self._rollouts = Rollouts(self._pooled, **self._options)
            # A stream that is still open has the pool for itself.
            rollouts = Rollouts(self._pooled, **self._options) if self._rollouts.busy else self._rollouts
            yield from rollouts.steps(request, responses, self, fixed_weights=self._fixed_weights)
        else:
            yield from plain_steps(
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

    def unprepare(self, *, keep: bool = False) -> None:
        """Let go of what `prepare` made; keep: the buffers stay, for the next time."""
        self._fixed_weights = False
        for fused in self._fused:
            fused.release(keep=keep)
        for module in self._faster or ():
            vars(module).pop("forward", None)

    def release(self) -> None:
        """Let go of the pool, of graphs, and of where they write."""
        self._rollouts = self._responses = None
