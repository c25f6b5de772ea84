"""liger-kernel's fused norms and MLPs for a loaded model, kept only if the hidden states stay the same."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from dschat.models.backbone import TokenNetwork, evaluation_mode
from dschat.models.layer_weights import run_with_full_weights
from dschat.models.packed.trial import trial_rows
from dschat.models.weights import full_shape

logger = logging.getLogger(__name__)

# What is bound to one model's modules. Not rope, which would replace a function of every model of the class, and not
# the losses: log-probs are computed from hidden states.
_KERNELS = {
    "rms_norm": True, "layer_norm": True, "swiglu": True, "geglu": True,
    "rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False,
}  # fmt: skip


@torch.no_grad()
def use_liger_kernels(network: TokenNetwork) -> None:
    """Replace the forward passes of the model's norms and MLPs by liger-kernel's, in place, where it knows the model.

    Hidden states of a few tokens are computed before and after, in float32 layer by layer. If they differ, or the
    model is not supported, the model stays as it was and the log says so. Parameters and their names do not change. A
    collective under ZeRO-3. Moves the network to this process's device.

    Raises:
        ImportError: liger-kernel is not installed.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    if any(p.is_meta for p in network.parameters()):
        return
    network.to(get_accelerator().current_device_name())
    model = network.model
    expected, rounding = _hidden_states(network)
    attributes = {module: dict(module.__dict__) for module in model.modules()}
    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    try:
        _apply_liger_kernel_to_instance(model=model, **_KERNELS)
    finally:
        # It also replaces the classes for models that are created later; those are patched and checked themselves.
        names.update(before)
    if all(module.__dict__.keys() == kept.keys() for module, kept in attributes.items()):
        logger.warning("--kernels liger: liger-kernel has no kernels for %s: it runs torch's", type(model).__name__)
        return
    hidden, _ = _hidden_states(network)
    error, tolerance = float((hidden - expected).abs().max()), rounding * float(expected.abs().max())
    if error <= tolerance:
        return
    for module, kept in attributes.items():
        module.__dict__.clear()
        module.__dict__.update(kept)
    logger.warning(
        "--kernels liger: %s runs torch's kernels, since hidden states would differ by %.2g (tolerance %.2g)",
        type(model).__name__, error, tolerance,
    )  # fmt: skip


def _hidden_states(network: TokenNetwork) -> tuple[Tensor, float]:
    """[N, H] float32 of a few tokens, without dropout, and the rounding error to expect relative to the largest."""
    with evaluation_mode(network):
        return run_with_full_weights(network, network.model.dtype, partial(_trial, network))


def _trial(network: TokenNetwork, dtype: torch.dtype) -> tuple[Tensor, float]:
    embeddings: Any = network.model.get_input_embeddings().weight
    ids, mask = trial_rows(full_shape(embeddings)[0], embeddings.device)
    hidden, source = network.backbone(ids, mask)
    return hidden[source[mask.flatten()]].float(), max(1e-4, 4 * torch.finfo(dtype).eps)
