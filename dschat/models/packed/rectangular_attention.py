"""Attention over rectangular batches by torch's operations, for packed rows that no kernel takes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, dropout: float) -> Tensor:
    """torch's attention; q [B, H, L, D], k and v [B, G, K, D], mask [B, 1, L, K] bool; None: causal."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, is_causal=mask is None
    )


def transformed_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, dropout: float, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention with soft-capped logits (Gemma 2), or one extra logit per head that takes probability (gpt-oss)."""
    groups = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    logits = q @ k.transpose(-1, -2) * scale  # [B, H, L, K]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is None:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    if sinks is not None:
        logits = torch.cat([logits, sinks.reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)], dim=-1)
    probabilities = logits.softmax(dim=-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]]
    return F.dropout(probabilities, dropout) @ v
