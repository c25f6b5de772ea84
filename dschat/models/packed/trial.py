"""Finds by a trial how a model can be run without padding: on its real tokens alone, with equal prompts once."""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import Tensor

from dschat.models.backbone import Packing, TokenNetwork, evaluation_mode
from dschat.models.layer_weights import run_with_full_weights
from dschat.models.weights import full_shape
from dschat.models.windows import short_windows

logger = logging.getLogger(__name__)

# Real tokens of the trial's rows; the first two have the same prompt, longer than a shortened window.
_LENGTHS, _PROMPT = (17, 13, 9), 7


@torch.no_grad()
def enable_packing(network: TokenNetwork, *, remove_padding: bool, share_prompts: bool) -> None:
    """Set how the network runs a batch: what the user allows and a trial shows to be equal to padded rows.

    The trial compares hidden states of a few tokens in float32, gathered layer by layer, with shortened windows; it is
    a collective under ZeRO-3. Call it before the network is wrapped in an engine.

    Args:
        network: its `backbone` is set.
        remove_padding: False: padded rectangles. A model that does not support packing keeps them too, and the log
            says so.
        share_prompts: whether rows with equal prompts compute them once, where the model supports it.
    """
    network.backbone.aligns_left = True
    if not remove_padding or any(p.is_meta for p in network.parameters()):
        return
    with evaluation_mode(network), short_windows(network.model):
        packing, reason = run_with_full_weights(network, network.model.dtype, partial(_supported, network))
    network.backbone.packing = Packing(packing.remove_padding, packing.share_prompts and share_prompts)
    if reason is not None:
        without = "prompts are not shared" if packing.remove_padding else "batches are padded"
        logger.warning("%s: %s, since %s", type(network.model).__name__, without, reason)


def _supported(network: TokenNetwork, dtype: torch.dtype) -> tuple[Packing, str | None]:
    """What gives the hidden states of padded rows, computed in this precision; the reason if that is not everything."""
    backbone, embeddings = network.backbone, network.model.get_input_embeddings().weight
    ids, mask = trial_rows(full_shape(embeddings)[0], embeddings.device)
    prompts = torch.tensor([_PROMPT, _PROMPT, 0], device=ids.device)
    backbone.packing = Packing()
    expected, _ = backbone(ids, mask)
    alone = torch.cat([backbone(ids[row : row + 1, :length], mask[row : row + 1, :length])[0] for row, length in
                       enumerate(_LENGTHS)])  # fmt: skip
    expected = expected[mask.flatten()]
    # Rounding, against which the error of another computation is measured.
    relative = max(1e-4, 4 * torch.finfo(dtype).eps)
    tolerance = max(relative * float(expected.abs().max()), 4 * float((alone - expected).abs().max()))
    supported, reason = Packing(), None
    for trial in (Packing(True), Packing(True, share_prompts=True)):
        backbone.packing = trial
        try:
            hidden, source = backbone(ids, mask, prompt_lengths=prompts)
            error = float((hidden[source[mask.flatten()]] - expected).abs().max())
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # any error of the model's own code: not supported
            reason = f"its attention cannot be packed ({type(problem).__name__}: {problem})"
            break
        if not error <= tolerance:
            reason = f"hidden states would differ by {error:.2g} (tolerance {tolerance:.2g})"
            break
        supported = trial
    backbone.packing = Packing()
    return supported, reason


def trial_rows(vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """ids [3, S] long and attention_mask [3, S] bool, right-padded; two rows start with the same prompt."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (len(_LENGTHS), max(_LENGTHS)), generator=generator)
    ids[1, :_PROMPT] = ids[0, :_PROMPT]
    mask = torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]
    return ids.to(device), mask.to(device)
