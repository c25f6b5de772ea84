"""Generation request with its validation, and the device buffers that the generated tokens are written to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from dschat.generation.rollout import Rollout, left_pad
from dschat.generation.sampling import SamplingParams
from dschat.models.positions import position_limit
from dschat.tensors import seeded_uniform

# Numbers hashed per call, to bound memory: the hash works on int64 and allocates many temporaries.
UNIFORM_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for one response per prompt.

    A row's tokens depend only on its prompt, the weights, the sampling parameters and (seed, iteration, sample id), up
    to floating-point ties: not on the batch size or on other rows.

    Attributes:
        prompts: B non-empty lists of ids. Equal prompts share one prefill and its keys and values.
        max_new_tokens: ≥ 1, EOS included; one limit for all prompts or one per prompt.
        eos_token_ids: ids that end a response; None or empty: responses end only at max_new_tokens.
        pad_token_id: fills masked positions; it may equal an EOS.
        sampling: the sampling distribution.
        seed, iteration, sample_ids: seed the random numbers; sample_ids [B] long, unique over all ranks, default
            0 … B−1. Equal ids draw equal numbers.
    """

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int | Sequence[int]
    eos_token_ids: int | Sequence[int] | None
    pad_token_id: int
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    iteration: int = 0
    sample_ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def limits(self) -> list[int]:
        """The maximum number of new tokens for each prompt."""
        shared = isinstance(self.max_new_tokens, int)
        return [self.max_new_tokens] * len(self) if shared else list(self.max_new_tokens)

    @property
    def stop_ids(self) -> list[int]:
        """The ids that end a response, as a list."""
        ids = self.eos_token_ids
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    def uniforms(self, device: torch.device) -> Tensor | None:
        """The uniform numbers in (0, 1) for inverse-CDF sampling, [B, T] float32; None if sampling is greedy."""
        if self.sampling.greedy:
            return None
        sample_ids = torch.arange(len(self)) if self.sample_ids is None else self.sample_ids
        columns = torch.arange(max(self.limits), device=device)
        rows = sample_ids.to(device).unsqueeze(1).split(max(1, UNIFORM_CHUNK // len(columns)))
        return torch.cat([seeded_uniform(self.seed, self.iteration, part, columns) for part in rows])

    def check(self, config: PreTrainedConfig) -> None:
        """Validate; raises one ValueError listing all problems (numbers out of range, too many tokens, unknown ids).

        Empty prompts raise a ValueError of their own, see left_pad.
        """
        left_pad(self.prompts, pad_token_id=0, device=torch.device("cpu"))  # raises for empty prompts
        problems, limits = [], self.limits
        if len(limits) != len(self):
            problems.append(f"max_new_tokens has {len(limits)} limits, but there are {len(self)} prompts")
        elif min(limits) < 1:
            problems.append(f"max_new_tokens is {min(limits)}, but a response has at least 1 token")
        if self.sample_ids is not None and self.sample_ids.shape != (len(self),):
            problems.append(f"sample_ids has shape {tuple(self.sample_ids.shape)}, but there are {len(self)} prompts")
        positions, kind = position_limit(config)
        longest, limit = max(((len(p), limit) for p, limit in zip(self.prompts, limits)), key=sum)  # noqa: B905
        # The last token is never an input, so it needs no position.
        if positions is not None and longest + limit - 1 > positions:
            problems.append(
                f"the longest prompt has {longest} tokens, {longest + limit} with max_new_tokens {limit}, "
                f"but the model has {positions} {kind}: shorten one of them"
            )
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
        largest, smallest = max(map(max, self.prompts)), min(map(min, self.prompts))
        if smallest < 0 or vocabulary is not None and largest >= vocabulary:
            problems.append(
                f"the prompts have ids from {smallest} to {largest}, but the model's vocabulary has {vocabulary}: "
                "encode them with the model's own tokenizer"
            )
        if problems:
            raise ValueError("; ".join(problems) + ".")


class Responses:
    """Output buffers of a request: the tokens generated so far, one row per prompt.

    A step writes token t of row b at index 1 + b·T + t of the flat tensors; writes of ended rows go to index 0.

    Attributes:
        tokens: [at least 1 + B·T] long. logprobs, uniforms: same length, float32; uniforms None if sampling is greedy.
        lengths: [B] long, number of tokens of each row.
        columns: T, the largest limit.
    """

    discard_index = 0

    def __init__(self, request: Request, device: torch.device, *, reuse: Responses | None = None) -> None:
        """Allocate empty buffers; reuse: an instance no longer in use, whose tensors are reused if large enough."""
        self.columns = max(request.limits)
        self.size = len(request) * self.columns
        fits = reuse is not None and len(reuse.tokens) > self.size and reuse.tokens.device == device
        self.tokens = reuse.tokens if fits else torch.empty(1 + self.size, dtype=torch.long, device=device)
        self.logprobs = reuse.logprobs if fits else torch.empty(1 + self.size, device=device)
        self.tokens.fill_(request.pad_token_id)
        self.logprobs.zero_()
        self.lengths = torch.zeros(len(request), dtype=torch.long, device=device)
        # A greedy request keeps the buffer: captured steps of later sampled requests read this address.
        self._uniform_buffer = reuse._uniform_buffer if fits else None
        self.uniforms = None
        uniforms = request.uniforms(device)
        if uniforms is not None:
            if self._uniform_buffer is None:
                self._uniform_buffer = torch.empty_like(self.logprobs)
            self.uniforms = self._uniform_buffer
            self.uniforms[0] = 0.5
            self.uniforms[1 : 1 + self.size] = uniforms.flatten()

    def first_index(self, rows: Tensor) -> Tensor:
        """Flat index of the first response token of these rows."""
        return 1 + rows * self.columns

    def as_rows(self, flat: Tensor) -> Tensor:
        """A flat buffer viewed as [B, T]."""
        return flat[1 : 1 + self.size].view(-1, self.columns)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses and lengths of the buffers that a step reads and writes."""
        tables = (self.tokens, self.logprobs, self._uniform_buffer)
        return tuple(number for table in tables if table is not None for number in (table.data_ptr(), len(table)))

    @property
    def nbytes(self) -> int:
        """Total size of all buffers."""
        return sum(t.nbytes for t in (self.tokens, self.logprobs, self._uniform_buffer, self.lengths) if t is not None)

    def rollout(self, request: Request) -> Rollout:
        """Build the padded rollout; a row has ended if its last token is a stop id.

        Raises:
            FloatingPointError: a token was drawn from logits that are not finite.
            RuntimeError: a row neither ended nor reached its limit, which is a bug of the decoder.
        """
        device = self.tokens.device
        longest = int(self.lengths.max())
        prompts, prompt_mask = left_pad(request.prompts, pad_token_id=request.pad_token_id, device=device)
        columns = torch.arange(longest, device=device)
        mask = columns < self.lengths.unsqueeze(1)  # [B, T]
        rows = self.as_rows(self.tokens)
        # A row that restarted after running out of memory may have left tokens beyond its end.
        tokens = torch.where(mask, rows[:, :longest], request.pad_token_id)
        last = rows.gather(1, (self.lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)  # [B]
        ended = torch.isin(last, torch.tensor(request.stop_ids, dtype=torch.long, device=device))
        logprobs = self.as_rows(self.logprobs)[:, :longest]
        self._require_complete_rows(request, ended)
        _require_finite(logprobs, mask)
        return Rollout(
            sequences=torch.cat([prompts, tokens], dim=1),
            attention_mask=torch.cat([prompt_mask, mask], dim=1),
            response_mask=mask,
            logprobs=torch.where(mask, logprobs, 0.0),
            ended=ended,
        )

    def require_finite(self, start: int, stop: int) -> None:
        """Raise FloatingPointError if tokens start … stop − 1 of the first row were drawn from non-finite logits."""
        logprobs = self.logprobs[1 + start : 1 + stop].unsqueeze(0)
        _require_finite(logprobs, torch.ones_like(logprobs, dtype=torch.bool))

    def _require_complete_rows(self, request: Request, ended: Tensor) -> None:
        limits = torch.tensor(request.limits, device=self.lengths.device)
        missing = (self.lengths < 1) | (~ended & (self.lengths != limits))  # [B]
        if bool(missing.any()):
            raise RuntimeError(
                f"rows {_format_indices(missing)} of the rollout have neither an EOS nor max_new_tokens tokens. This "
                "is a bug of the decoder, not of the request; please report it."
            )


def _require_finite(logprobs: Tensor, mask: Tensor) -> None:
    """Raise FloatingPointError naming the rows with a token drawn from non-finite logits: its log-prob is NaN.

    Args:
        logprobs, mask: [B, T].

    Called once per rollout, so that no decoding step has to synchronise.
    """
    rows = (~logprobs.isfinite() & mask).any(dim=1)  # [B]
    if bool(rows.any()):
        raise FloatingPointError(
            f"rows {_format_indices(rows)} of the rollout have logits that are not finite (NaN or infinite): no token "
            "can be sampled. Check the model's weights; a model that overflows in float16 needs --dtype bf16 or "
            "fp32; if training has diverged, load an earlier checkpoint."
        )


def _format_indices(rows: Tensor) -> str:
    """Format the first few indices at which rows [B] bool is True."""
    numbers = rows.nonzero().squeeze(1).tolist()
    return ", ".join(map(str, numbers[:8])) + (f" … ({len(numbers)} of {len(rows)})" if len(numbers) > 8 else "")
