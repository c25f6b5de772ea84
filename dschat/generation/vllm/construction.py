"""Constructs vllm.LLM inside a training process, and leaves the process as it was."""

from __future__ import annotations

import copy
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedModel

from dschat.arguments.vllm import VLLMArguments
from dschat.distributed import watchdog
from dschat.generation.vllm.adapters import lora_arguments
from dschat.generation.vllm.requirements import GIB, kv_cache_gib

if TYPE_CHECKING:
    from vllm import LLM

CPU_BATCH = 4096  # tokens of prompts in a forward pass
# Read when vLLM is imported; those of the user take precedence.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this process, so requests are deterministic
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about tokenizers and libraries that are not used here
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads stay free for the training of this process
}


def build_llm(model: PreTrainedModel, options: VLLMArguments, *, max_tokens: int, seed: int) -> LLM:
    """An engine of the model's architecture with random weights; `load_weights` gives it the policy's.

    A collective over all ranks, as vLLM profiles memory and creates its groups together.

    Args:
        model: the policy; its config, as it is now, determines the engine's (a resized vocabulary included).
        max_tokens: of the longest prompt and response.
        seed: of the engine; requests have their own.

    Raises:
        RuntimeError: vLLM could not start; with its reason.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    on_cpu = next(model.parameters()).device.type == "cpu"
    eager = on_cpu if options.vllm_enforce_eager is None else options.vllm_enforce_eager
    max_length = options.vllm_max_model_len or max_tokens
    dtype = str(model.dtype).removeprefix("torch.")
    arguments = {
        "dtype": dtype, "load_format": "dummy", "skip_tokenizer_init": True, "generation_config": "vllm",
        "max_model_len": max_length, "enforce_eager": eager, "seed": seed,
        "tensor_parallel_size": options.vllm_tensor_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "gpu_memory_utilization": options.vllm_gpu_memory_utilization,
        "enable_sleep_mode": not on_cpu and options.vllm_sleep_level > 0,
        "logprobs_mode": "processed_logprobs", "disable_log_stats": True,
    }  # fmt: skip
    if on_cpu:  # vLLM 0.30 cannot cut the prompt of a seeded request: it would rewind a generator that has no offset
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(CPU_BATCH, max_length)}
    if cache := kv_cache_gib(options, on_cpu=on_cpu):
        arguments["kv_cache_memory_bytes"] = int(cache * GIB)
    if options.vllm_quantization:
        arguments["quantization"] = options.vllm_quantization
    if options.vllm_lora:
        arguments |= lora_arguments(model)
    watchdog.phase("vLLM start")
    with tempfile.TemporaryDirectory() as folder, unchanged_process():
        config = copy.deepcopy(model.config)
        config.architectures = config.architectures or [type(model).__name__]
        config.save_pretrained(folder)
        try:
            return LLM(folder, **arguments | options.engine_args)
        except Exception as error:
            raise RuntimeError(f"vLLM did not start: {error}") from error


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Restore the random generators, which vLLM reseeds, and torch.set_num_threads, which it disables."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    accelerator = get_accelerator()
    device = accelerator.get_rng_state() if accelerator.device_name() != "cpu" else None
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if device is not None:
            accelerator.set_rng_state(device)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
