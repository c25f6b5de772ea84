"""Attention over packed rows as one of transformers' attention implementations: any model that dispatches can use it.

Inside `packed_attention(config, layout)` a model's mask function returns a PackedMask instead of a tensor, which the
model hands to every layer's attention function; that one attends inside the sequences of the layout. Windows and
chunks come from the model's own mask function, evaluated at the positions inside each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from dschat.models.cpu.attention import AttentionKernels
from dschat.models.cpu.library import DTYPES
from dschat.models.packed import flash_attention
from dschat.models.packed.layout import PackedLayout, Visible
from dschat.models.packed.rectangular_attention import sdpa, transformed_attention

ATTENTION_NAME = "dschat_packed"
RUNS_UNCOMPILED = "packed attention is not compiled"
_running: ContextVar[tuple[PackedLayout | None, AttentionKernels | None]] = ContextVar(
    "packed_attention", default=(None, None)
)


@dataclass(frozen=True)
class PackedMask:
    """What one kind of layer attends to in a packed row.

    Attributes:
        visible: the attention pattern by positions in a sequence; None: causal.
        kernels: of the CPU; None: torch's attention.
    """

    layout: PackedLayout
    visible: Visible | None
    kernels: AttentionKernels | None

    @cached_property
    def masks(self) -> list[Tensor | None]:
        """Of the layout's buckets."""
        return self.layout.masks(self.visible)

    @cached_property
    def first_visible(self) -> Tensor | None:
        """First position that each position attends to."""
        return self.layout.first_visible(self.visible)

    @cached_property
    def window(self) -> int | None:
        """Number of last positions that each position attends to; None: all."""
        return self.layout.window(self.visible)

    @cached_property
    def fits_flash_kernels(self) -> bool:
        """Whether they know the pattern: causal, or a window without prefixes."""
        try:
            return self.window is None or self.layout.variable_lengths.queries is None
        except NotImplementedError:
            return False


@contextmanager
def packed_attention(
    config: PreTrainedConfig, layout: PackedLayout, *, kernels: AttentionKernels | None = None
) -> Iterator[None]:
    """Run the model of this config over one packed row.

    The backward pass may leave the context before it runs, except under gradient checkpointing: see forward_context.

    Args:
        kernels: that attend on a CPU; None: torch's.
    """
    original, token = config._attn_implementation, _running.set((layout, kernels))
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = original
        _running.reset(token)


def _packed_mask(
    *_: Any, mask_function: Callable[..., Tensor], allow_is_causal_skip: bool = True, local_size: int | None = None,
    use_vmap: bool = False, **__: Any,
) -> PackedMask:  # fmt: skip
    """The model's mask for the current layout, with the signature of transformers' AttentionMaskInterface.

    Raises: NotImplementedError for masks that depend on more than positions.
    """
    layout, kernels = _running.get()
    if layout is None or use_vmap:
        raise NotImplementedError("packed attention: this model's mask depends on more than positions")
    causal = allow_is_causal_skip and (local_size is None or local_size >= layout.longest)
    visible: Visible | None = None if causal else lambda queries, keys: mask_function(0, 0, queries, keys)
    return PackedMask(layout, visible, kernels)


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
    layout, kernels = attention_mask.layout, attention_mask.kernels
    plain = softcap is None and s_aux is None and dropout == 0
    q, k, v = query.squeeze(0), key.squeeze(0), value.squeeze(0)  # x[0] would copy gradients into zeros
    if plain and kernels is not None and q.dtype in DTYPES:
        out = kernels.attention(q, k, v, layout.groups, attention_mask.first_visible, scale=scale)  # [H, N, Dv]
        return out.transpose(0, 1)[None], None
    if plain and flash_attention.supports(q, v) and attention_mask.fits_flash_kernels:
        out = flash_attention.attention(q, k, v, layout, window=attention_mask.window, scale=scale)
        return out.transpose(0, 1)[None], None
    if softcap is None and s_aux is None:
        attend = partial(sdpa, scale=scale, dropout=dropout)
    else:
        attend = partial(transformed_attention, scale=scale, dropout=dropout, softcap=softcap, sinks=s_aux)
    out = layout.attention(q, k, v, masks=attention_mask.masks, attend=attend)  # [H, N, Dv]
    return out.transpose(0, 1)[None].contiguous(), None


AttentionInterface.register(ATTENTION_NAME, _attend_packed)
AttentionMaskInterface.register(ATTENTION_NAME, _packed_mask)
