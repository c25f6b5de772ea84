"""The suite's VLLMEngine in the benchmark's own process, as in training; needs the environment of install.sh vllm."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from shapes import Case
from transformers import PreTrainedModel

from dschat.arguments import VLLMArguments
from dschat.distributed import launch
from dschat.generation.vllm.engine import VLLMEngine
from dschat.generation.vllm.requirements import version_problems


@dataclass
class ColocatedVLLM:
    """A running engine.

    Attributes:
        start_seconds: for its construction and the first loading of weights.
    """

    engine: VLLMEngine
    start_seconds: float

    @classmethod
    def start(cls, model: PreTrainedModel, cases: Sequence[Case], *, kv_bytes: int, seed: int) -> "ColocatedVLLM":
        """An engine for the largest of these cases.

        Args:
            kv_bytes: of the KV cache.

        Raises:
            RuntimeError: vLLM is not installed in this environment, or did not start.
        """
        if problems := version_problems():
            raise RuntimeError(f"{problems[0]}; run the benchmark with .venv-vllm/bin/python")
        launch.join(seed=seed)
        options = VLLMArguments(
            vllm_kv_cache_gib=kv_bytes / 2**30, vllm_engine_args=[f"max_num_seqs={max(case.batch for case in cases)}"]
        )
        start = time.perf_counter()
        engine = VLLMEngine(model, options, max_tokens=max(case.columns for case in cases), seed=seed)
        with engine.generation():
            pass
        return cls(engine, time.perf_counter() - start)

    def rollout(self, case: Case, *, seed: int) -> int:
        """Load the weights and generate; returns the number of tokens."""
        with torch.no_grad():  # the engine skips weights that it has: this change stands for an update
            next(self.engine.policy.parameters()).view(-1)[0].neg_()
        with self.engine.generation():
            result = self.engine.generate(
                case.prompts, max_new_tokens=case.limits, eos_token_ids=None, pad_token_id=0, seed=seed
            )
        return int(result.response_mask.sum())
