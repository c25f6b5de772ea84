"""Model FLOP of a training step, and the device's peak, for model FLOP utilisation (MFU).

MFU = FLOP that the algorithm needs for the real tokens ÷ (seconds · peak). A forward pass takes 2 FLOP per weight of a
matrix and token, plus 2 · L · A · n² for causal attention inside a sequence of n tokens, where A is heads · head width;
a backward pass takes twice as much. The head counts only for tokens whose log-prob is needed. Embeddings, norms, the
optimizer, padding and recomputation count nothing; a prompt that several sequences share counts for each of them, so
sharing can raise MFU above what the arithmetic units do. The peak is the rate of a large matrix product, measured in
the same run with the same dtype and threads.
"""

from __future__ import annotations

import time

import torch
from measure import synchronize
from transformers import AutoModelForCausalLM, PreTrainedConfig

from dschat.runs.flops import ModelShape, forward_flops, model_shape

# Forward passes of FLOP 1, forward and backward of FLOP 3: over whole sequences.
#   grpo: rollout 1, reference 1, update 3; ppo: also values 1 and update of the critic 3.
BODY_PASSES = {"sft": 3, "rm": 3, "dpo": 3, "grpo": 5, "ppo": 9}
HEAD_PASSES = {"sft": 3, "rm": 0, "dpo": 3, "grpo": 5, "ppo": 5}
REFERENCE_PASSES = {"grpo": 1, "ppo": 1}  # left out without a KL penalty
MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}


def shape_of(config: PreTrainedConfig) -> ModelShape:
    """What determines the FLOP of a causal language model of this config."""
    with torch.device("meta"):
        return model_shape(AutoModelForCausalLM.from_config(config, trust_remote_code=False))


def training_flop(
    shape: ModelShape, kind: str, lengths: list[int], *, prompt_tokens: int, with_reference: bool = True
) -> float:
    """FLOP of training once on sequences of these lengths, of whose tokens `prompt_tokens` have no loss."""
    without = 0 if with_reference else REFERENCE_PASSES.get(kind, 0)
    body, head = BODY_PASSES[kind] - without, max(0, HEAD_PASSES[kind] - without)
    head_flop = 2 * shape.head_parameters * (sum(lengths) - prompt_tokens)
    return body * forward_flops(shape, lengths, head_tokens=0) + head * head_flop


def peak_flops(device: torch.device, dtype: torch.dtype, *, repeat: int = 5) -> float:
    """FLOP per second of the fastest of several large matrix products."""
    size = MATMUL_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    fastest = float("inf")
    for _ in range(repeat):
        synchronize(device)
        start = time.perf_counter()
        a @ b
        synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest
