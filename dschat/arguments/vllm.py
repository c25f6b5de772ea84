"""Flags of --rollout_engine vllm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dschat.arguments.flags import flag
from dschat.arguments.strict_json import parse_json


@dataclass
class VLLMArguments:
    """vLLM as the rollout engine: in the training processes, on the same devices, without a server."""

    _argument_group_name: ClassVar[str] = "vLLM"
    vllm_tensor_parallel_size: int = flag(
        1, "Devices that share one engine; it must divide the number of processes.", at_least=1, on_resume="apply",
    )  # fmt: skip
    vllm_gpu_memory_utilization: float = flag(
        0.4, "Fraction of a GPU's memory for an engine's weights and KV cache.", above=0, at_most=1, on_resume="apply",
    )  # fmt: skip
    vllm_kv_cache_gib: float = flag(
        0.0, "KV cache of an engine, GiB; 0: what --vllm_gpu_memory_utilization leaves, on a CPU 1.", at_least=0,
        on_resume="apply",
    )  # fmt: skip
    vllm_max_model_len: int = flag(
        0, "Longest prompt and response together; 0: --max_prompt_seq_len + --max_answer_seq_len.", at_least=0,
        on_resume="apply",
    )  # fmt: skip
    vllm_enforce_eager: bool | None = flag(
        None, "Run the model without compilation and CUDA graphs. Default: only on a CPU.", on_resume="apply",
    )  # fmt: skip
    vllm_sleep_level: Literal[0, 1, 2] = flag(
        2, "On a GPU, what an engine releases while the policy trains: 0 nothing, 1 the KV cache (weights move to host "
        "memory), 2 weights and KV cache.", on_resume="apply",
    )  # fmt: skip
    vllm_quantization: Literal["fp8"] | None = flag(
        None, "Quantise the engine's weights after each update; use it with --rollout_correction. Default: not at all.",
        on_resume="apply",
    )  # fmt: skip
    vllm_lora: bool = flag(
        False, "With adapters alone trained: load the base weights once, and after updates only the adapters, which "
        "vLLM applies unfolded.", on_resume="apply",
    )  # fmt: skip
    vllm_engine_args: list[str] = flag(
        [], "Further arguments of vllm.LLM, each KEY=VALUE with a JSON value or a string.", on_resume="apply",
    )  # fmt: skip

    def problems(self) -> list[str]:
        return [
            f"--vllm_engine_args {entry}: write KEY=VALUE"
            for entry in self.vllm_engine_args
            if not entry.partition("=")[0].isidentifier() or "=" not in entry
        ]

    @property
    def engine_args(self) -> dict[str, Any]:
        """--vllm_engine_args by key; a value that is not JSON is a string."""
        pairs = (entry.partition("=") for entry in self.vllm_engine_args)
        return {key: _value(text) for key, _, text in pairs}


def _value(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text
