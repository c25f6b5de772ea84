"""Requests to vLLM and its results: token ids in, token ids and log-probs out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from dschat.generation.request import Request, Responses
from dschat.generation.rollout import Rollout
from dschat.generation.sampling import SamplingParams

if TYPE_CHECKING:
    import vllm

SEED_BITS = 63  # of torch.Generator.manual_seed


class Sample(NamedTuple):
    """One request.

    Attributes:
        seed: of its random numbers, from (seed, iteration, sample id).
    """

    prompt: list[int]
    limit: int
    seed: int


def samples_of(request: Request) -> list[Sample]:
    """One sample per row of the request."""
    ids = range(len(request)) if request.sample_ids is None else request.sample_ids.tolist()
    return [
        Sample(list(prompt), limit, sample_seed(request.seed, request.iteration, sample_id))
        for prompt, limit, sample_id in zip(request.prompts, request.limits, ids, strict=True)
    ]


def sample_seed(seed: int, iteration: int, sample_id: int) -> int:
    """A seed in [0, 2⁶³) that depends on all three numbers."""
    digest = hashlib.blake2b(f"{seed} {iteration} {sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def sampling_params(samples: Sequence[Sample], request: Request) -> list[vllm.SamplingParams]:
    """vLLM's parameters of each sample. Responses end at the request's stop ids only, which are part of them."""
    import vllm

    sampling = request.sampling
    shared = {
        "temperature": sampling.temperature, "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "top_k": 0 if sampling.greedy else sampling.top_k, "stop_token_ids": request.stop_ids, "ignore_eos": True,
        "logprobs": 0, "detokenize": False,  # logprobs=0: of the sampled token alone
    }  # fmt: skip
    return [
        vllm.SamplingParams(max_tokens=sample.limit, seed=None if sampling.greedy else sample.seed, **shared)
        for sample in samples
    ]


def limit_vocabulary(model: nn.Module, *, size: int) -> None:
    """Make a vLLM model return logits of the ids below `size` alone; runs in its worker.

    Raises:
        RuntimeError: the model computes its logits in another way.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if not processors:
        raise RuntimeError(
            f"{type(model).__name__} of vLLM has no LogitsProcessor, so ids beyond the tokenizer's vocabulary could be "
            "sampled: use --rollout_engine hybrid"
        )
    for processor in processors:
        processor.org_vocab_size = processor.vocab_size = size  # the latter is read where adapters are applied


class Response(NamedTuple):
    """Token ids of a response, EOS included, and the log-prob of each under the sampling distribution."""

    ids: list[int]
    logprobs: list[float]


def response_of(output: vllm.RequestOutput) -> Response:
    """The response of a finished request.

    Raises:
        RuntimeError: the request failed or was aborted.
    """
    completion = output.outputs[0] if output.outputs else None
    if completion is None or completion.finish_reason not in ("stop", "length") or completion.logprobs is None:
        reason = "has no output" if completion is None else f"ended by {completion.finish_reason!r}"
        raise RuntimeError(
            f"vLLM could not generate a response to a prompt of {len(output.prompt_token_ids or ())} tokens: the "
            f"request {reason}; its log, shown with VLLM_LOGGING_LEVEL=INFO, has the cause"
        )
    ids = list(completion.token_ids)
    return Response(ids, [logprobs[token].logprob for token, logprobs in zip(ids, completion.logprobs, strict=True)])


def rollout_of(request: Request, responses: Sequence[Response], device: torch.device) -> Rollout:
    """The rollout of a request, with one response per row.

    Raises: as Responses.rollout.
    """
    buffers = Responses(replace(request, sampling=SamplingParams(temperature=0)), device)  # without random numbers
    buffers.lengths = torch.tensor([len(response.ids) for response in responses], device=device)
    mask = torch.arange(buffers.columns, device=device) < buffers.lengths[:, None]  # [B, T]
    ids = [token for response in responses for token in response.ids]
    logprobs = [logprob for response in responses for logprob in response.logprobs]
    buffers.as_rows(buffers.tokens)[mask] = torch.tensor(ids, device=device)
    buffers.as_rows(buffers.logprobs)[mask] = torch.tensor(logprobs, device=device)
    return buffers.rollout(request)
