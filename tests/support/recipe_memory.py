"""Bytes of memory on the most loaded GPU of a recipe, by the formulas of training/step3_rlhf_finetuning/README.md."""

from __future__ import annotations

from dataclasses import dataclass

from dschat.tensors import LOGIT_BLOCK_BYTES

BF16, STATES = 2, 16  # bytes a parameter: weights; fp32 gradient, master weight and both moments of a trained one


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder: layers L, width h, MLP width i, width of keys or values, vocabulary V, matrices of an MLP."""

    layers: int
    hidden: int
    mlp: int
    kv: int
    vocabulary: int
    mlp_matrices: int
    tied: bool

    @property
    def parameters(self) -> float:
        layer = 2 * self.hidden * (self.hidden + self.kv) + self.mlp_matrices * self.hidden * self.mlp
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def adapters(self, rank: int) -> float:
        """Parameters of LoRA beside every linear layer: rank · (in + out) each."""
        attention = 2 * 2 * self.hidden + 2 * (self.hidden + self.kv)
        return self.layers * rank * (attention + self.mlp_matrices * (self.hidden + self.mlp))


def opt(layers: int, hidden: int) -> Shape:
    return Shape(layers, hidden, 4 * hidden, hidden, 50272, 2, tied=True)


def gated(layers: int, hidden: int, mlp: int, kv: int, vocabulary: int, *, tied: bool) -> Shape:
    return Shape(layers, hidden, mlp, kv, vocabulary, 3, tied)


SHAPES = {
    "opt-350m": opt(24, 1024),
    "opt-1.3b": opt(24, 2048),
    "opt-6.7b": opt(32, 4096),
    "opt-13b": opt(40, 5120),
    "opt-30b": opt(48, 7168),
    "opt-66b": opt(64, 9216),
    "llama-3.1-8b": gated(32, 4096, 14336, 1024, 128256, tied=False),
    "llama-3.1-70b": gated(80, 8192, 28672, 1024, 128256, tied=False),
    "qwen2.5-0.5b": gated(24, 896, 4864, 128, 151936, tied=True),
    "qwen2.5-1.5b": gated(28, 1536, 8960, 256, 151936, tied=True),
    "qwen2.5-7b": gated(28, 3584, 18944, 512, 152064, tied=False),
    "smollm2-135m": gated(30, 576, 1536, 192, 49152, tied=True),
    "smollm2-360m": gated(32, 960, 2560, 320, 49152, tied=True),
    "smollm2-1.7b": gated(24, 2048, 8192, 2048, 49152, tied=True),
}


def trained(shape: Shape, *, stage: int, gpus: int, lora: int, offload: bool) -> float:
    """Weights, gradients and optimizer states of a model that is trained (with LoRA: its adapters alone)."""
    weights = shape.parameters + shape.adapters(lora)
    trained_parameters = shape.adapters(lora) if lora else shape.parameters
    weight_bytes = BF16 * weights / (gpus if stage == 3 else 1)
    states = STATES * trained_parameters / (gpus if stage >= 2 else 1)
    return (0 if offload and stage == 3 else weight_bytes) + (0 if offload and stage >= 2 else states)


def frozen(shape: Shape, *, stage: int, gpus: int, offload: bool) -> float:
    return 0 if offload else BF16 * shape.parameters / (gpus if stage == 3 else 1)


def activations(shape: Shape, *, sequences: int, tokens: int, checkpointing: bool) -> float:
    """Activations saved for backward, and four float32 copies of a block of logits (64 MiB)."""
    layer = 34 * shape.hidden + 8 * shape.mlp  # bytes a token
    saved = layer + 2 * shape.hidden * shape.layers if checkpointing else layer * shape.layers
    return sequences * tokens * saved + 4 * LOGIT_BLOCK_BYTES["accelerator"]


def rollout(shape: Shape, *, sequences: int, tokens: int, stage: int, lora: int) -> float:
    """A full copy of the actor if its weights are partitioned or need LoRA merging, and the KV cache."""
    copy = BF16 * shape.parameters if stage == 3 or lora else 0
    return copy + sequences * tokens * 2 * BF16 * shape.kv * shape.layers
