"""Attention in packed rows: tests how a model can keep conversations separate, and builds the mask."""

from __future__ import annotations

import deepspeed
import torch
from torch import Tensor

# Two rows of two conversations, the second row with padding: lengths of conversations and of padding.
_TRIAL = (((9, 15), 0), ((13, 8), 3))


@torch.no_grad()
def choose_packing(engine: deepspeed.DeepSpeedEngine) -> None:
    """Set the network's `uses_packing_mask` so that packed log-probs equal those of the unpacked conversations.

    Most models block attention between conversations where position ids restart; others compute their own positions
    or masks and need an explicit mask. Leaves the engine in evaluation mode. All ranks call this together.

    Args:
        engine: around TokenLogprobs.

    Raises:
        ValueError: neither works (recurrent models, ALiBi models that compute distances from padding masks).
    """
    engine.eval()
    network = engine.module
    vocabulary = network.model.get_input_embeddings().num_embeddings
    width = sum(_TRIAL[0][0])
    tokens = torch.randint(vocabulary, (len(_TRIAL), width), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[i for n in lengths for i in range(n)] + [0] * pad for lengths, pad in _TRIAL])
    tokens, positions = tokens.to(engine.device), positions.to(engine.device)
    predicted = positions > 0  # tokens with a prediction, packed and unpacked
    real = torch.ones_like(predicted)
    unpacked, unmasked = torch.zeros_like(tokens, dtype=torch.float32), engine(tokens, real, predicted)
    for row, (lengths, _) in enumerate(_TRIAL):
        for start, stop in zip((0, lengths[0]), (lengths[0], sum(lengths)), strict=True):
            part = (slice(row, row + 1), slice(start, stop))
            unpacked[part] = engine(tokens[part], real[part], predicted[part])
    # Difference caused by attention across conversations; rounding differences are far smaller.
    leak = (unmasked - unpacked).abs().max()
    windowed = getattr(network.model.config.get_text_config(), "sliding_window", None)
    for by_mask in (False,) if windowed else (False, True):  # packed_attention has no sliding window
        network.uses_packing_mask = by_mask
        try:
            difference = (engine(tokens, real, predicted, packed_positions=positions) - unpacked).abs().max()
        except Exception:  # the architecture may not accept a 4D mask: any error of its own code
            continue
        if difference <= leak / 10:
            return
    raise ValueError(
        f"--packing: {type(network.model).__name__} attends across the conversations of a packed row, "
        "which would change their losses: remove --packing, or choose another architecture."
    )


def packed_attention(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, S, S]: 0 on this and earlier tokens of the same conversation, elsewhere the dtype's minimum.

    Args:
        positions: [B, S] long, 0 at the start of each conversation and on padding, which attends to itself only.
    """
    conversation = (positions == 0).cumsum(dim=-1)  # [B, S]
    visible = (conversation[:, :, None] == conversation[:, None, :]).tril()  # [B, S, S]
    mask = torch.zeros(visible.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None]
