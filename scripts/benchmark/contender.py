"""The interface of a benchmark contender: a context manager that yields a Ready, whose turns are timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from measure import synchronize
from shapes import Case
from transformers import PreTrainedModel
from vllm_colocated import ColocatedVLLM
from vllm_process import VLLMProcess


@dataclass
class Setting:
    """Settings shared by all cases of a model.

    Attributes:
        start_vllm, start_colocated: return the running vLLM with this model's weights (in a process of its own, or in
            this one), or raise with the reason why it is unavailable.
    """

    model: PreTrainedModel
    device: torch.device
    seed: int
    start_vllm: Callable[[], VLLMProcess]
    start_colocated: Callable[[], ColocatedVLLM]


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


def timed(setting: Setting, rollout: Callable[[], int]) -> Callable[[], Turn]:
    """Time a function that returns the number of tokens it generated."""

    def turn() -> Turn:
        synchronize(setting.device)
        start = time.perf_counter()
        tokens = rollout()
        synchronize(setting.device)
        return Turn(time.perf_counter() - start, tokens)

    return turn


def one_line(error: BaseException) -> str:
    """An exception as one table cell."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
