"""The generation engines under comparison, by the names of --contenders.

All sample at temperature 1 from the whole vocabulary and end response b at limits[b] tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from contender import Contender, Ready, Setting, Turn, timed
from deepspeed_contender import deepspeed_rollout
from shapes import Case
from transformers import PreTrainedModel
from transformers_contenders import continuous_batching, generated, left_padded, transformers_generate

from dschat.generation import HybridEngine, SamplingParams


@contextmanager
def ours(
    setting: Setting, case: Case, *, without: frozenset[str] = frozenset(), pin_buffers: bool = False
) -> Iterator[Ready]:
    """HybridEngine. The weight transfer is part of the rollout, as in training."""
    engine = HybridEngine(setting.model, without=without, pin_buffers=pin_buffers)

    def rollout() -> int:
        with engine.generation():
            result = engine.generate(
                case.prompts, max_new_tokens=case.limits, eos_token_ids=None, pad_token_id=0, seed=setting.seed
            )
        return int(result.response_mask.sum())

    yield Ready(timed(setting, rollout))


@contextmanager
def vllm(setting: Setting, case: Case) -> Iterator[Ready]:
    """vLLM in its own process, which is stopped between turns; time is measured in that process."""
    process = setting.start_vllm()
    process.set_requests(case.prompts, case.limits)
    note = f"vLLM {process.version}, started in {process.start_seconds:.0f} s, memory with weights"
    yield Ready(lambda: Turn(*process.turn()), note, process.peak_bytes)


@contextmanager
def vllm_colocated(setting: Setting, case: Case) -> Iterator[Ready]:
    """VLLMEngine in this process. The weight transfer is part of the rollout, as in training."""
    running = setting.start_colocated()
    yield Ready(
        timed(setting, lambda: running.rollout(case, seed=setting.seed)), f"started in {running.start_seconds:.0f} s"
    )


CONTENDERS: dict[str, Contender] = {
    "ours": ours,
    "ours-pinned": partial(ours, pin_buffers=True),
    "dynamic": transformers_generate,
    "static": partial(transformers_generate, cache="static"),
    "continuous": continuous_batching,
    "deepspeed": deepspeed_rollout,
    "deepspeed-graphs": partial(deepspeed_rollout, graphs=True),
    "vllm": vllm,
    "vllm-colocated": vllm_colocated,
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
        result = engine.generate(
            prompts, max_new_tokens=limits, eos_token_ids=None, pad_token_id=0, sampling=SamplingParams(temperature=0)
        )
    expected = generated(exact, *left_padded(prompts, exact.device), limits, do_sample=False)
    pairs = zip(result.responses(), expected, strict=True)
    return sum(a == b for actual, reference in pairs for a, b in zip(actual, reference, strict=False)), sum(limits)
