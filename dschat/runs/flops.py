"""Floating-point operations of a model's passes, and of a device: their ratio is the model FLOP utilisation (MFU)."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dschat.models.weights import full_shape

TRAINING_FACTOR = 3  # forward and backward, in units of forward; recomputation is no useful work
_MEASURED_ROWS = 512  # of the square matrices that measure a CPU
_MEASURED_SECONDS = 0.1


@dataclass(frozen=True)
class ModelShape:
    """What determines the FLOPs of a model.

    Attributes:
        layer_parameters: weights of linear layers that each token passes; of experts, those that a token is routed to.
        head_parameters: weights of the output head, for tokens whose logits or scores are computed.
        attention_width: heads · head dimension, summed over the layers with attention.
    """

    layer_parameters: float
    head_parameters: float
    attention_width: int


def model_shape(model: PreTrainedModel) -> ModelShape:
    """Count the linear layers of a causal language model or classifier, also under ZeRO-3 and with LoRA.

    Linear layers are nn.Linear, GPT-2's Conv1D, and the three-dimensional weights [experts, …] of modules named
    "experts", of which num_experts_per_tok / number of experts are used; if each expert has layers of its own, of
    these too. Embeddings, norms, and routers that are no nn.Linear are left out. Causal attention is assumed in each
    layer, too much for windows and for linear attention.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    head = model.get_output_embeddings() or getattr(model, "score", None)
    layer_parameters = 0.0
    for path, module in model.named_modules():
        if module is head:
            continue
        share = _active_share(path, config)
        if isinstance(module, (nn.Linear, Conv1D)):
            layer_parameters += share * full_shape(module.weight).numel()
        elif path.rpartition(".")[2] == "experts":
            weights = (full_shape(parameter) for parameter in module.parameters(recurse=False))
            layer_parameters += share * sum(shape.numel() for shape in weights if len(shape) == 3)
    return ModelShape(
        layer_parameters=layer_parameters,
        head_parameters=0 if head is None else full_shape(head.weight).numel(),
        attention_width=config.num_hidden_layers * heads * head_dim,
    )


def _active_share(path: str, config: object) -> float:
    """Fraction of a module's weights that a token uses: below 1 inside "experts"."""
    if "experts" not in path.split("."):
        return 1.0
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((count for name in names if (count := getattr(config, name, None))), None)
    active = getattr(config, "num_experts_per_tok", None)
    return active / total if active and total else 1.0


def forward_flops(shape: ModelShape, lengths: Sequence[int], *, head_tokens: int | None = None) -> float:
    """FLOPs of a forward pass over sequences of these lengths, with causal attention inside each.

    2 · weights for each token, and 2 · 2 · width · length² / 2 for the products QKᵀ and PV of each layer; a training
    step takes TRAINING_FACTOR times as many.

    Args:
        lengths: real tokens of each sequence.
        head_tokens: tokens whose logits are computed; None: all.

    Source: Kaplan et al. 2020, section 2.1 (arXiv:2001.08361); Chowdhery et al. 2022, appendix B (arXiv:2204.02311),
    with half of their attention, since it is causal.
    """
    tokens = sum(lengths)
    head_tokens = tokens if head_tokens is None else head_tokens
    linear = 2 * (shape.layer_parameters * tokens + shape.head_parameters * head_tokens)
    return linear + 2 * shape.attention_width * sum(length * length for length in lengths)


# Dense TFLOP/s of products in bf16, fp16 and fp32 (TF32 where the GPU has it); 0: not supported. A key is matched as a
# whole word of a device's name; the first match counts.
PEAK_TFLOPS: dict[str, tuple[float, float, float]] = {
    "B200": (2250, 2250, 1100),
    "H200 NVL": (835, 835, 418),
    "H200": (989, 989, 494),
    "H100 PCIe": (756, 756, 378),
    "H100 NVL": (835, 835, 418),
    "H100": (989, 989, 494),
    "A100": (312, 312, 156),
    "A10": (125, 125, 62.5),
    "L40S": (362, 362, 183),
    "L4": (121, 121, 60),
    "RTX 4090": (165, 165, 82.6),
    "RTX 3090": (71, 71, 35.6),
    "V100-PCIE": (0, 112, 14),
    "V100": (0, 125, 15.7),
    "T4": (0, 65, 8.1),
    "MI300X": (1307, 1307, 654),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of matrix products in a dtype: of a GPU its data sheet's, of a CPU those measured now; None if unknown.

    Data sheets of NVIDIA (B200, H200, H100, A100, A10, L40S, L4, V100, T4 Tensor Core GPU; white papers of the Ada and
    Ampere GA102 architectures for RTX 4090 and 3090, with accumulation in fp32) and AMD (Instinct MI300X), halved where
    they assume sparsity. A CPU is measured with torch's current number of threads, in about 0.1 s, once.
    """
    if device.type == "cpu":
        return _measured_flops(dtype, torch.get_num_threads())
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device), dtype)


def peak_flops_of(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of the GPU of this name, see PEAK_TFLOPS; None if it is not there, or does not support the dtype."""
    columns = (torch.bfloat16, torch.float16, torch.float32)
    row = next((row for key, row in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name)), None)
    if row is None or dtype not in columns:
        return None
    return row[columns.index(dtype)] * 1e12 or None


@functools.cache
def _measured_flops(dtype: torch.dtype, threads: int) -> float:
    """Largest FLOP/s of a few products of square matrices; `threads` is a key of the cache."""
    matrix = torch.ones(_MEASURED_ROWS, _MEASURED_ROWS, dtype=dtype)
    fastest, end = float("inf"), time.perf_counter() + _MEASURED_SECONDS
    while fastest == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        matrix @ matrix
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * _MEASURED_ROWS**3 / fastest
