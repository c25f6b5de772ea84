"""The generation engines under comparison, each set up for a case and called repeatedly.

A contender is a context manager that yields a Ready. All sample at temperature 1 from the whole vocabulary and end
response b at limits[b] tokens.
"""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from measure import synchronize
from shapes import Case
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, StoppingCriteria
from vllm_process import VLLMProcess

from dschat.generation import HybridEngine, SamplingParams


@dataclass
class Setting:
    """Settings shared by all cases of a model.

    Attributes:
        start_vllm: returns the running vLLM with this model's weights, or raises with the reason why it is unavailable.
    """

    model: PreTrainedModel
    device: torch.device
    seed: int
    start_vllm: Callable[[], VLLMProcess]


class Turn(NamedTuple):
    """Measurement of one rollout from prompts to tokens."""

    seconds: float
    tokens: int  # generated


class Ready(NamedTuple):
    """A contender that is set up; `turn` runs and times one rollout."""

    turn: Callable[[], Turn]
    note: str = ""
    peak_bytes: Callable[[], int] | None = None  # where this process cannot measure the memory


Contender = Callable[[Setting, Case], AbstractContextManager[Ready]]


def clocked(setting: Setting, rollout: Callable[[], int]) -> Callable[[], Turn]:
    """Time a function that returns the number of tokens it generated."""

    def turn() -> Turn:
        synchronize(setting.device)
        start = time.perf_counter()
        tokens = rollout()
        synchronize(setting.device)
        return Turn(time.perf_counter() - start, tokens)

    return turn


@contextmanager
def ours(
    setting: Setting, case: Case, *, without: frozenset[str] = frozenset(), pin_buffers: bool = False
) -> Iterator[Ready]:
    """HybridEngine. The weight transfer is part of the rollout, as in training."""
    engine = HybridEngine(setting.model, without=without, pin_buffers=pin_buffers)

    def rollout() -> int:
        with engine.generation():
            made = engine.generate(
                case.prompts, max_new_tokens=case.limits, eos_token_ids=None, pad_token_id=0, seed=setting.seed
            )
        return int(made.response_mask.sum())

    yield Ready(clocked(setting, rollout))


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
    return _cut(sequences[:, ids.shape[1] :], limits)


def _cut(responses: Tensor, limits: Sequence[int]) -> list[list[int]]:
    return [row[:limit] for row, limit in zip(responses.tolist(), limits, strict=True)]


@contextmanager
def transformers_generate(setting: Setting, case: Case, *, cache: str | None = None) -> Iterator[Ready]:
    """transformers' `generate` with its dynamic cache, or with the static one (with which it compiles on CUDA)."""
    ids, mask = left_padded(case.prompts, setting.device)
    more = {"cache_implementation": cache} if cache else {}
    torch._dynamo.reset()  # each case has new shapes; dynamo stops recompiling after a few

    def rollout() -> int:
        return sum(map(len, generated(setting.model, ids, mask, case.limits, do_sample=True, **more)))

    yield Ready(clocked(setting, rollout))


@contextmanager
def continuous_batching(setting: Setting, case: Case) -> Iterator[Ready]:
    """transformers' continuous batching: finished rows leave, prompts are shared by whole pages or by forks."""
    page = ContinuousBatchingConfig().page_size
    samples = case.prompt_kind.samples
    # Forks share the whole prompt, but need one length for all.
    forks = samples if case.batch % samples == 0 and len(set(case.limits)) == 1 else 1
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

    def rollout() -> int:
        for prompt, limit in zip(case.prompts[::forks], case.limits[::forks], strict=True):
            manager.add_request(prompt, max_new_tokens=limit, eos_token_id=-1)
        tokens = finished = 0
        while finished < case.batch:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError(f"its thread ended: {manager.background_thread_status.fatal_error}")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                finished, tokens = finished + 1, tokens + len(result.generated_tokens)
        return tokens

    def turn() -> Turn:
        # In training, weights change between rollouts, so cached keys and values are invalid.
        if manager.batch_processor is not None and manager.is_running():
            with manager.pause():
                manager.batch_processor.cache.free_all_requests(clear_ledgers=True)
        return clocked(setting, rollout)()

    manager.start()
    try:
        yield Ready(turn)
    finally:
        manager.stop(block=True, timeout=10, hard_stop=True)
        manager.destroy()


@contextmanager
def deepspeed_rollout(setting: Setting, case: Case, *, graphs: bool = False) -> Iterator[Ready]:
    """DeepSpeed's HybridEngineRollout: around its hybrid engine where that can be built, else around a plain engine.

    Single rows can end only by EOS, so it decodes all rows to the longest limit; with CUDA graphs it is greedy only.
    """
    from deepspeed.runtime.rollout.base import RolloutRequest, SamplingConfig
    from deepspeed.runtime.rollout.hybrid_engine_rollout import HybridEngineRollout, HybridEngineRolloutConfig

    if graphs and setting.device.type != "cuda":
        raise RuntimeError("its graph capture needs CUDA")
    with contextlib.redirect_stdout(sys.stderr):  # standard output is reserved for the table
        engine, note = _deepspeed_engine(setting, case)
    ids, mask = left_padded(case.prompts[:: case.prompt_kind.samples], setting.device)
    samples = case.prompt_kind.samples
    rollout_engine = HybridEngineRollout(
        engine, SimpleNamespace(pad_token_id=0, eos_token_id=None), HybridEngineRolloutConfig(use_graph_capture=graphs)
    )
    sampling = SamplingConfig(
        max_new_tokens=max(case.limits), temperature=0.0 if graphs else 1.0, n_samples_per_prompt=samples
    )

    def rollout() -> int:
        made = rollout_engine.generate(RolloutRequest(ids, mask), sampling)
        return sum(map(len, _cut(made.input_ids[: case.batch, ids.shape[1] :], case.limits)))

    try:
        yield Ready(clocked(setting, rollout), "; ".join(filter(None, ["greedy" if graphs else "", note])))
    finally:
        engine.destroy()


def _deepspeed_engine(setting: Setting, case: Case) -> tuple[torch.nn.Module, str]:
    """An engine in eval mode, and a note about it for the table."""
    os.environ.setdefault("DS_ACCELERATOR", setting.device.type)  # DeepSpeed's own choice ignores --device
    import deepspeed

    if not torch.distributed.is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update(alone)
        deepspeed.init_distributed("nccl" if setting.device.type == "cuda" else "gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": setting.model.dtype == torch.bfloat16},
        "fp16": {"enabled": setting.model.dtype == torch.float16},
    }
    reason = "its kernels need CUDA"
    if setting.device.type == "cuda":
        try:
            hybrid = {"enabled": True, "max_out_tokens": case.columns}
            # It injects its kernels into the module, so it gets its own copy.
            engine, *_ = deepspeed.initialize(
                model=copy.deepcopy(setting.model), config=config | {"hybrid_engine": hybrid}
            )
            engine.eval()  # returns None
            return engine, ""
        except Exception as error:  # any failure becomes the note of the plain engine
            reason = one_line(error)
    engine, *_ = deepspeed.initialize(model=setting.model, config=config)
    engine.eval()
    return engine, f"plain engine: {reason}"


@contextmanager
def vllm(setting: Setting, case: Case) -> Iterator[Ready]:
    """vLLM in its own process, which is stopped between turns; time is measured in that process."""
    process = setting.start_vllm()
    process.take(case.prompts, case.limits)
    note = f"vLLM {process.version}, started in {process.start_seconds:.0f} s, memory of its processes, weights too"
    yield Ready(lambda: Turn(*process.turn()), note, process.peak_bytes)


def one_line(error: BaseException) -> str:
    """An exception as one table cell."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


CONTENDERS: dict[str, Contender] = {
    "ours": ours,
    "ours-pinned": partial(ours, pin_buffers=True),
    "dynamic": transformers_generate,
    "static": partial(transformers_generate, cache="static"),
    "continuous": continuous_batching,
    "deepspeed": deepspeed_rollout,
    "deepspeed-graphs": partial(deepspeed_rollout, graphs=True),
    "vllm": vllm,
}


def equal_greedy_tokens(model: PreTrainedModel, case: Case, *, rows: int = 8) -> tuple[int, int]:
    """Decode some rows of a case greedily in float32 with our engine and with `generate`.

    Returns:
        Number of equal tokens, position by position, and total number of tokens.
    """
    chosen = sorted({0, min(1, case.batch - 1), *range(0, case.batch, max(1, case.batch // rows))})
    prompts, limits = [case.prompts[i] for i in chosen], [case.limits[i] for i in chosen]
    exact = copy.deepcopy(model).float()
    engine = HybridEngine(exact)
    with engine.generation():
        made = engine.generate(
            prompts, max_new_tokens=limits, eos_token_ids=None, pad_token_id=0, sampling=SamplingParams(temperature=0)
        )
    expected = generated(exact, *left_padded(prompts, exact.device), limits, do_sample=False)
    pairs = zip(made.responses(), expected, strict=True)
    return sum(a == b for found, wanted in pairs for a, b in zip(found, wanted, strict=False)), sum(limits)
