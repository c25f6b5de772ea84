"""Compares the weights inside vLLM with those that the policy streamed into it, by checksums.

vLLM fuses some weights (the rows of q, k and v, for example) and may pad rows with zeros, which changes no sum. On a
CPU it repacks matrices, whose elements cannot be read then: they are compared by their product with a fixed vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

# Relative error of a product of a matrix and a vector that rounding explains.
PRODUCT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
PACKED = "cpu_linear"  # attribute of vLLM's modules that compute with a packed copy of their weight, on a CPU
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True)
class Checksum:
    """What is compared of a weight.

    Attributes:
        bits: sum of the elements' bit patterns; None where they cannot be read.
        product: [out] float32, the matrix times `probe`; None for other weights.
    """

    bits: int | None
    product: Tensor | None


@dataclass(frozen=True)
class EngineWeights:
    """The weights of a vLLM model on this rank.

    Attributes:
        checksums: by vLLM's names.
        fused: last part of a module's name in vLLM → those of the modules that it fuses.
    """

    checksums: dict[str, Checksum]
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)


def checksum(weight: Tensor) -> Checksum:
    """Of a plain weight of the policy."""
    product = weight.float() @ probe(weight.shape[1], weight.device) if weight.dim() == 2 else None
    return Checksum(_bits(weight), product)


def engine_weights(model: nn.Module) -> EngineWeights:
    """Read a vLLM model; runs in its worker."""
    checksums = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            bits = _bits(parameter) if parameter.numel() else None
            product = None
            width = getattr(module, "input_size_per_partition", getattr(module, "embedding_dim", None))
            if name == "weight" and isinstance(width, int) and hasattr(module, PACKED):
                vector = probe(width, parameter.device).to(parameter.dtype)
                product = module.quant_method.apply(module, vector[None], bias=None)[0].float()
            checksums[f"{path}.{name}"] = Checksum(bits, product)
    return EngineWeights(checksums, getattr(model, "packed_modules_mapping", {}))


def repack_weights(model: nn.Module) -> None:
    """Pack the weights that vLLM 0.30 leaves unpacked when it reloads them on a CPU; runs in its worker.

    It repacks the modules that weights are loaded into, of which a tied head is none, so its logits would come from the
    weights before; and it packs experts in the first load alone, so they would be read in another order.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(module, PACKED) and module.weight.numel():
            method.process_weights_after_loading(module)
        backend = getattr(method, "unquantized_backend", None)
        if backend is not None and backend.name == "CPU":
            method.moe_kernel.fused_experts.process_weights_after_loading(module)


def differing_weights(
    policy: Mapping[str, Checksum], engine: EngineWeights, *, tied: Mapping[str, str], dtype: torch.dtype
) -> list[str]:
    """vLLM's names of weights that are not the policy's. Names that the policy does not have are not compared.

    Args:
        policy: `checksum` of each plain weight, by its Hugging Face name.
        tied: names of weights that the policy does not stream → the weights they are tied to.
        dtype: of the weights, the same in both.
    """
    differing = []
    for name, actual in engine.checksums.items():
        sources = [policy.get(tied.get(source, source)) for source in source_names(name, engine.fused)]
        if any(source is None for source in sources):
            continue
        if actual.bits is not None and actual.bits != sum(source.bits for source in sources):
            differing.append(name)
        elif actual.product is not None and all(source.product is not None for source in sources):
            expected = torch.cat([source.product for source in sources])
            product = actual.product[: len(expected)]  # a vocabulary is padded
            # GPT-2 keeps its matrices transposed, so its products cannot be compared.
            if product.shape == expected.shape and _distance(product, expected) > PRODUCT_TOLERANCE[dtype]:
                differing.append(name)
    return differing


def _distance(product: Tensor, expected: Tensor) -> float:
    return float((product - expected).norm() / expected.norm().clamp(min=1e-30))


def source_names(name: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of the policy's weights that a weight of vLLM consists of."""
    path, _, leaf = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    return [f"{parent}.{part}.{leaf}" for part in fused[module]] if module in fused else [name]


def probe(width: int, device: torch.device) -> Tensor:
    """A fixed vector [width] of numbers of both signs, exact in bfloat16."""
    return ((torch.arange(width, device=device) * 37) % 15 - 7).float() / 8


def _bits(weight: Tensor) -> int:
    return int(weight.detach().contiguous().view(_INTEGERS[weight.element_size()]).sum(dtype=torch.int64))
