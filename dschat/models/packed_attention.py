"""Attention over packed rows as one of transformers' attention implementations: any model that dispatches can use it.

Inside `packed_attention(config, layout)` a model's mask function returns a PackedMask instead of a tensor, which the
model hands to every layer's attention function; that one attends inside the sequences of the layout. Windows and
chunks come from the model's own mask function, evaluated at the positions inside each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from dschat.models import cpu_attention
from dschat.models.packed_layout import PackedLayout, Visible

ATTENTION_NAME = "dschat_packed"
RUNS_UNCOMPILED = "packed attention is not compiled"
_layout: ContextVar[PackedLayout | None] = ContextVar("packed_layout", default=None)


@dataclass(frozen=True)
class PackedMask:
    """What one kind of layer attends to: a layout, and the masks of its buckets (None: causal)."""

    layout: PackedLayout
    masks: list[Tensor | None]


@contextmanager
def packed_attention(config: PreTrainedConfig, layout: PackedLayout) -> Iterator[None]:
    """Run the model of this config over one packed row.

    The backward pass may leave the context before it runs, except under gradient checkpointing (recompute_contexts).
    """
    original, token = config._attn_implementation, _layout.set(layout)
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = original
        _layout.reset(token)


def recompute_contexts(config: PreTrainedConfig) -> tuple[AbstractContextManager, AbstractContextManager]:
    """`context_fn` of torch.utils.checkpoint: layers are recomputed with the attention of their forward pass."""
    layout = _layout.get()
    return nullcontext(), nullcontext() if layout is None else packed_attention(config, layout)


def _packed_mask(
    *_: Any, mask_function: Callable[..., Tensor], allow_is_causal_skip: bool = True, local_size: int | None = None,
    use_vmap: bool = False, **__: Any,
) -> PackedMask:  # fmt: skip
    """The model's mask for the current layout, with the signature of transformers' AttentionMaskInterface.

    Raises: NotImplementedError for masks that depend on more than positions.
    """
    layout = _layout.get()
    if layout is None or use_vmap:
        raise NotImplementedError("packed attention: this model's mask depends on more than positions")
    causal = allow_is_causal_skip and (local_size is None or local_size >= layout.longest)
    visible: Visible | None = None if causal else lambda queries, keys: mask_function(0, 0, queries, keys)
    return PackedMask(layout, layout.masks(visible))


# Its loop over buckets differs with each batch: compiled layers break their graph here.
@partial(torch.compiler.disable, reason=RUNS_UNCOMPILED)
def _attend_packed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: PackedMask | None, *,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None,
    is_causal: bool | None = None, position_bias: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention inside the sequences of a packed row, with the signature of transformers' AttentionInterface.

    Args:
        query: [1, H, N, D]; key, value: [1, G, N, D], [1, G, N, Dv].
        softcap, s_aux: of models that cap the logits or have attention sinks.

    Returns: [1, N, H, Dv], None

    Raises: NotImplementedError for a bias by position, or without a PackedMask.
    """
    if not isinstance(attention_mask, PackedMask) or position_bias is not None or is_causal is False:
        raise NotImplementedError("packed attention: this model's attention depends on more than its mask")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layout, masks = attention_mask.layout, attention_mask.masks
    if softcap is None and s_aux is None and cpu_attention.supports(query, value, dropout=dropout):
        out = cpu_attention.attention(query[0], key[0], value[0], layout, masks, scale=scale)
        return out.transpose(0, 1)[None], None
    if softcap is None and s_aux is None:
        attend = partial(_sdpa, scale=scale, dropout=dropout)
    else:
        attend = partial(_transformed_attention, scale=scale, dropout=dropout, softcap=softcap, sinks=s_aux)
    out = layout.attention(query[0], key[0], value[0], masks=masks, attend=attend)  # [H, N, Dv]
    return out.transpose(0, 1)[None].contiguous(), None


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, dropout: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, is_causal=mask is None
    )


def _transformed_attention(
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


AttentionInterface.register(ATTENTION_NAME, _attend_packed)
AttentionMaskInterface.register(ATTENTION_NAME, _packed_mask)
