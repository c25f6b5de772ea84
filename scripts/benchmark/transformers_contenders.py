"""Decoding with transformers: `generate` with its caches, and continuous batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from contender import Ready, Setting, Turn, timed
from shapes import Case
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
)


class ForcedLengths(StoppingCriteria):
    """Ends row b of `generate` at limits[b] tokens; generation continues until all rows have ended."""

    def __init__(self, limits: Sequence[int], *, prompt_columns: int, device: torch.device) -> None:
        self.limits = torch.tensor(limits, device=device)  # [B]
        self.prompt_columns = prompt_columns

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        return input_ids.shape[1] - self.prompt_columns >= self.limits  # [B] bool


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """ids and attention mask, [B, P] long each."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def generated(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, limits: Sequence[int], **settings: object
) -> list[list[int]]:
    """The responses of transformers' `generate`, each cut at its length: B lists of ids."""
    config = GenerationConfig(
        max_new_tokens=max(limits), eos_token_id=None, pad_token_id=0, top_k=0, top_p=1.0, temperature=1.0, **settings
    )
    stop = ForcedLengths(limits, prompt_columns=ids.shape[1], device=ids.device)
    sequences = model.generate(ids, attention_mask=mask, generation_config=config, stopping_criteria=[stop])
    return cut_to_lengths(sequences[:, ids.shape[1] :], limits)


def cut_to_lengths(responses: Tensor, limits: Sequence[int]) -> list[list[int]]:
    return [row[:limit] for row, limit in zip(responses.tolist(), limits, strict=True)]


@contextmanager
def transformers_generate(setting: Setting, case: Case, *, cache: str | None = None) -> Iterator[Ready]:
    """transformers' `generate` with its dynamic cache, or with the static one (with which it compiles on CUDA)."""
    ids, mask = left_padded(case.prompts, setting.device)
    more = {"cache_implementation": cache} if cache else {}
    torch._dynamo.reset()  # each case has new shapes; dynamo stops recompiling after a few

    def rollout() -> int:
        return sum(map(len, generated(setting.model, ids, mask, case.limits, do_sample=True, **more)))

    yield Ready(timed(setting, rollout))


@contextmanager
def continuous_batching(setting: Setting, case: Case) -> Iterator[Ready]:
    """transformers' continuous batching: finished rows leave, prompts are shared by whole pages or by forks."""
    samples = case.prompt_kind.samples
    # Forks share the whole prompt, but need one length for all.
    forks = samples if case.batch % samples == 0 and len(set(case.limits)) == 1 else 1
    manager = batching_manager(setting, case, forks=forks)

    def rollout() -> int:
        for prompt, limit in zip(case.prompts[::forks], case.limits[::forks], strict=True):
            manager.add_request(prompt, max_new_tokens=limit, eos_token_id=-1)
        return count_tokens(manager, responses=case.batch)

    def turn() -> Turn:
        # In training, weights change between rollouts, so cached keys and values are invalid.
        if manager.batch_processor is not None and manager.is_running():
            with manager.pause():
                manager.batch_processor.cache.free_all_requests(clear_ledgers=True)
        return timed(setting, rollout)()

    manager.start()
    try:
        yield Ready(turn)
    finally:
        manager.stop(block=True, timeout=10, hard_stop=True)
        manager.destroy()


def batching_manager(setting: Setting, case: Case, *, forks: int) -> ContinuousBatchingManager:
    """A manager whose cache holds all rows of the case; `forks` responses per request."""
    page = ContinuousBatchingConfig().page_size
    manager = setting.model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0,
            num_return_sequences=forks,
        ),
        # By default it allocates most of the memory and leaves none for the other contenders.
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=case.batch * -(-case.columns // page) + 8, seed=setting.seed
        ),
    )  # fmt: skip
    manager.warmup()
    return manager


def count_tokens(manager: ContinuousBatchingManager, *, responses: int) -> int:
    """Wait for this many responses; returns the number of their tokens. Raises RuntimeError if generation fails."""
    tokens = finished = 0
    while finished < responses:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError(f"its thread ended: {manager.background_thread_status.fatal_error}")
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(result.error)
            finished, tokens = finished + 1, tokens + len(result.generated_tokens)
    return tokens
