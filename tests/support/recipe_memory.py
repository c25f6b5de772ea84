"""Bytes of memory on the most loaded GPU of a recipe, by the formulas of training/step3_rlhf_finetuning/README.md.

`memory_parts` splits them into lines with their arithmetic, as the headers of the YAML recipes state them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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


@dataclass(frozen=True)
class Part:
    """Memory of one purpose; rollout and update do not overlap.

    Attributes:
        arithmetic: a Python expression in bytes, of rounded numbers of parameters.
        bytes: its exact value.
    """

    name: str
    arithmetic: str
    bytes: float
    phase: Literal["always", "rollout", "update"] = "always"

    def __str__(self) -> str:
        return f"{self.name}: {self.arithmetic} = {self.bytes / 1e9:.1f}"


def peak(parts: Sequence[Part]) -> float:
    """Bytes of the parts that are always there, and of the larger one of rollout and update."""
    always, rollout, update = (
        sum(part.bytes for part in parts if part.phase == phase) for phase in ("always", "rollout", "update")
    )
    return always + max(rollout, update)


def memory_parts(flags: Mapping[str, Any], gpus: int) -> list[Part]:
    """Parts of a run of any step, from the values of all its flags."""
    if "actor_model_name_or_path" in flags:
        return list(_parts_of_step_3(flags, gpus))
    shape = shape_of(flags["model_name_or_path"])
    # A pair is two sequences. DPO's reference is freed before the policy is loaded.
    sequences = flags["per_device_train_batch_size"] * (2 if {"centering_coef", "beta"} & flags.keys() else 1)
    return [
        *trained("model", shape, stage=flags["zero_stage"], gpus=gpus, lora=flags["lora_dim"],
                 offload=flags["offload"]),
        *update("", shape, sequences=sequences, tokens=flags["max_seq_len"],
                checkpointing=flags["gradient_checkpointing"]),
    ]  # fmt: skip


def _parts_of_step_3(flags: Mapping[str, Any], gpus: int) -> Iterator[Part]:
    actor = shape_of(flags["actor_model_name_or_path"])
    models = {"actor": actor}
    if flags["algorithm"] == "ppo":
        models["critic"] = shape_of(flags["critic_model_name_or_path"] or flags["reward_model_name_or_path"])
    for name, shape in models.items():
        yield from trained(name, shape, stage=flags[f"{name}_zero_stage"], gpus=gpus, lora=flags[f"{name}_lora_dim"],
                           offload=flags["offload"])  # fmt: skip
    if flags["kl_coef"] > 0 and not (flags["actor_lora_dim"] and flags["only_optimize_lora"]):
        yield from frozen("reference", actor, stage=flags["actor_zero_stage"], gpus=gpus,
                          offload=flags["offload_reference_model"])  # fmt: skip
    if flags["reward_model_name_or_path"]:
        reward = shape_of(flags["reward_model_name_or_path"])
        yield from frozen("reward model", reward, stage=flags["critic_zero_stage"], gpus=gpus,
                          offload=flags["offload_reward_model"])  # fmt: skip
    tokens = flags["max_prompt_seq_len"] + flags["max_answer_seq_len"]
    yield from rollout(
        actor, sequences=flags["per_device_generation_batch_size"] * flags["num_samples_per_prompt"], tokens=tokens,
        stage=flags["actor_zero_stage"], lora=flags["actor_lora_dim"],
    )  # fmt: skip
    # Actor and critic are updated one after the other.
    largest = max(models, key=lambda name: activation_bytes(models[name], flags["gradient_checkpointing"]))
    yield from update(f" of the {largest}", models[largest], sequences=flags["per_device_training_batch_size"],
                      tokens=tokens, checkpointing=flags["gradient_checkpointing"])  # fmt: skip


def shape_of(path: str) -> Shape:
    """The shape that a hub name, or the output folder of a recipe (output/MODEL/STEP), names."""
    return next(SHAPES[name] for name in reversed(path.lower().split("/")) if name in SHAPES)


def trained(name: str, shape: Shape, *, stage: int, gpus: int, lora: int, offload: bool) -> Iterator[Part]:
    """Weights, and gradients with optimizer states, of a model that is trained (with LoRA: its adapters alone)."""
    weights = shape.parameters + shape.adapters(lora)
    trained_parameters = shape.adapters(lora) if lora else shape.parameters
    if not (offload and stage == 3):
        yield _divided(f"{name}, weights", BF16, weights, gpus if stage == 3 else 1)
    if not (offload and stage >= 2):
        yield _divided(f"{name}, gradients and optimizer states", STATES, trained_parameters, gpus if stage >= 2 else 1)


def frozen(name: str, shape: Shape, *, stage: int, gpus: int, offload: bool) -> Iterator[Part]:
    if not offload:
        yield _divided(f"{name}, weights", BF16, shape.parameters, gpus if stage == 3 else 1)


def _divided(name: str, bytes_each: int, parameters: float, gpus: int) -> Part:
    divisor = f" / {gpus}" if gpus > 1 else ""
    return Part(name, f"{bytes_each} * {parameters / 1e9:.3g}e9{divisor}", bytes_each * parameters / gpus)


def activation_bytes(shape: Shape, checkpointing: bool) -> int:
    """Bytes a token of the activations that are saved for the backward pass."""
    layer = 34 * shape.hidden + 8 * shape.mlp
    return layer + 2 * shape.hidden * shape.layers if checkpointing else layer * shape.layers


def update(of: str, shape: Shape, *, sequences: int, tokens: int, checkpointing: bool) -> Iterator[Part]:
    """Activations saved for backward, and four float32 copies of a block of logits (64 MiB)."""
    layer = f"34 * {shape.hidden} + 8 * {shape.mlp}"
    saved = f"({layer} + 2 * {shape.hidden} * {shape.layers})" if checkpointing else f"({layer}) * {shape.layers}"
    size = sequences * tokens * activation_bytes(shape, checkpointing)
    yield Part(f"update, activations{of}", f"{sequences} * {tokens} * {saved}", size, "update")
    logits = 4 * LOGIT_BLOCK_BYTES["accelerator"]
    yield Part("update, logits", f"4 * {LOGIT_BLOCK_BYTES['accelerator'] >> 20} * 2**20", logits, "update")


def rollout(shape: Shape, *, sequences: int, tokens: int, stage: int, lora: int) -> Iterator[Part]:
    """A full copy of the actor if its weights are partitioned or need LoRA merging, and the KV cache."""
    if stage == 3 or lora:
        size = BF16 * shape.parameters
        yield Part("rollout, full copy of the actor", f"{BF16} * {shape.parameters / 1e9:.3g}e9", size, "rollout")
    arithmetic = f"{sequences} * {tokens} * {2 * BF16} * {shape.kv} * {shape.layers}"
    yield Part("rollout, KV cache", arithmetic, sequences * tokens * 2 * BF16 * shape.kv * shape.layers, "rollout")
