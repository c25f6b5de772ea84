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
from dataclasses import dataclass

import torch
from measure import synchronize
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

# Forward passes of FLOP 1, forward and backward of FLOP 3: over whole sequences.
#   grpo: rollout 1, reference 1, update 3; ppo: also values 1 and update of the critic 3.
BODY_PASSES = {"sft": 3, "rm": 3, "dpo": 3, "grpo": 5, "ppo": 9}
HEAD_PASSES = {"sft": 3, "rm": 0, "dpo": 3, "grpo": 5, "ppo": 5}
REFERENCE_PASSES = {"grpo": 1, "ppo": 1}  # left out without a KL penalty
MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True)
class ModelCost:
    """Weights of a shape that multiply: `body` in layers, `head` in the output embedding; and L · A."""

    body: int
    head: int
    attention: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelCost:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        head = model.get_output_embeddings()
        linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            body=sum(linear.weight.numel() for linear in linears),
            head=head.weight.numel(),
            attention=config.num_hidden_layers * config.num_attention_heads * width,
        )

    def flop(self, kind: str, lengths: list[int], *, prompt_tokens: int, with_reference: bool = True) -> float:
        """FLOP of training once on sequences of these lengths, of whose tokens `prompt_tokens` have no loss."""
        without = 0 if with_reference else REFERENCE_PASSES.get(kind, 0)
        body, head = BODY_PASSES[kind] - without, max(0, HEAD_PASSES[kind] - without)
        tokens, squares = sum(lengths), sum(length**2 for length in lengths)
        body_flop = 2 * (self.body * tokens + self.attention * squares)
        return body * body_flop + head * 2 * self.head * (tokens - prompt_tokens)


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
