"""Whether, and how, a model keeps the conversations of a packed row apart: found out by trying, whatever its name."""

from __future__ import annotations

import deepspeed
import torch
from torch import Tensor

# Two rows of two conversations, the second row with padding: lengths of conversations and of padding.
_TRIAL = (((9, 15), 0), ((13, 8), 3))


@torch.no_grad()
def choose_packing(engine: deepspeed.DeepSpeedEngine) -> None:
    """Set the network's `packs_by_mask` to the way in which packed log-probs are those of conversations alone.

    Most models see positions that restart and block attention between conversations; others compute positions or
    masks of their own, and are given a mask. Leaves the engine in evaluation mode. All ranks call this together.

    Args:
        engine: of TokenLogprobs.

    Raises:
        ValueError: in neither way (recurrent models, ALiBi models that compute distances from padding masks).
    """
    engine.eval()
    network = engine.module
    vocabulary = network.model.get_input_embeddings().num_embeddings
    width = sum(_TRIAL[0][0])
    tokens = torch.randint(vocabulary, (len(_TRIAL), width), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[i for n in lengths for i in range(n)] + [0] * pad for lengths, pad in _TRIAL])
    tokens, positions = tokens.to(engine.device), positions.to(engine.device)
    inside = positions > 0  # tokens that something predicts, in packed rows and alone
    real = torch.ones_like(inside)
    alone, joined = torch.zeros_like(tokens, dtype=torch.float32), engine(tokens, real, inside)
    for row, (lengths, _) in enumerate(_TRIAL):
        for start, stop in zip((0, lengths[0]), (lengths[0], sum(lengths)), strict=True):
            part = (slice(row, row + 1), slice(start, stop))
            alone[part] = engine(tokens[part], real[part], inside[part])
    # Conversations that see each other differ from those alone by this much; rounding, by far less.
    leak = (joined - alone).abs().max()
    windowed = getattr(network.model.config.get_text_config(), "sliding_window", None)
    for by_mask in (False,) if windowed else (False, True):  # our mask has no window in it
        network.packs_by_mask = by_mask
        try:
            difference = (engine(tokens, real, inside, packed_positions=positions) - alone).abs().max()
        except Exception:  # a mask of a shape that this architecture does not expect: any error of its own code
            continue
        if difference <= leak / 10:
            return
    raise ValueError(
        f"--packing: {type(network.model).__name__} lets the conversations of a packed row see each other, "
        "so they would not be trained as they are alone: leave --packing out, or choose another architecture."
    )


def packed_attention(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, S, S]: 0 on this and earlier tokens of the same conversation, elsewhere the lowest number.

    Args:
        positions: [B, S] long, 0 at the start of each conversation and on padding, so that padding sees itself alone.
    """
    conversation = (positions == 0).cumsum(dim=-1)  # [B, S]
    visible = (conversation[:, :, None] == conversation[:, None, :]).tril()  # [B, S, S]
    mask = torch.zeros(visible.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None]
