"""Decoding attention: one query token per row against that row's context in the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.generation.cpu import cpp_kernels
from dschat.generation.cuda import triton_kernels


@dataclass(frozen=True)
class Contexts:
    """Location of the contexts of R rows in the pool of one layer.

    The context of a row is two runs of the pool: its prompt, which other rows may share, and its own response, which
    ends with the newest token.

    Attributes:
        keys, values: [N, G, D], [N, G, Dv], the pool of the layer, N tokens with G key-value heads.
        spans: [R, 4] long: start and length of the prompt, start and length (newest token included) of the response.
        longest: upper bound of the context lengths, as a host integer to avoid a device synchronisation.
    """

    keys: Tensor
    values: Tensor
    spans: Tensor
    longest: int

    @property
    def newest(self) -> Tensor:
        """[R] long, the index of each row's newest token in the pool."""
        return self.spans[:, 2] + self.spans[:, 3] - 1


@dataclass(frozen=True)
class Scoring:
    """Attention parameters: how the tokens of a context are scored.

    Attributes:
        scale: multiplies query · key.
        window: sliding window: attend only to the last `window` tokens; None: all.
        softcap: c in c · tanh(score / c); None: none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


def decode_attention(
    query: Tensor, new_key: Tensor, new_value: Tensor, contexts: Contexts, scoring: Scoring, *, kernels: bool = True
) -> Tensor:
    """Write each row's newest key and value into the pool, then attend to the row's context.

    Only the context is read, so there is no mask and no padding.

    Args:
        query: [R, H, D]; H is a multiple of G, the key-value heads (grouped-query attention).
        new_key, new_value: [R, G, D], [R, G, Dv] of the newest token.
        contexts: their keys and values are contiguous, and written at each row's newest token.
        kernels: use the C++ or Triton kernels where available; else plain torch.

    Returns:
        [R, H, Dv] in the query's dtype, accumulated in float32.

    Source: Ainslie et al. 2023 (arXiv:2305.13245) for grouped queries; Dao 2023 (arXiv:2307.08691) for the online
        softmax of the CUDA kernel.
    """
    on_cpu = kernels and query.device.type == "cpu" and query.dtype in cpp_kernels.DTYPES
    if on_cpu and (library := cpp_kernels.load()):
        return library.decode_attention(query, new_key, new_value, contexts, scoring)
    if kernels and query.is_cuda and triton_kernels.available(query):
        from dschat.generation.cuda import attention, kv_writes  # import triton, which is optional

        kv_writes.write_kv(contexts.keys, contexts.values, new_key, new_value, contexts.newest)
        return attention.decode_attention(query, contexts, scoring)
    newest = contexts.newest
    contexts.keys.index_copy_(0, newest, new_key)
    contexts.values.index_copy_(0, newest, new_value)
    return plain_attention(query, contexts, scoring)


def plain_attention(query: Tensor, contexts: Contexts, scoring: Scoring) -> Tensor:
    """decode_attention without the write, in plain torch on gathered, padded contexts: for any device, and tests."""
    keys, values, spans = contexts.keys, contexts.values, contexts.spans
    prompt_start, prompt_length, response_start, response_length = spans.T.unsqueeze(-1)  # each [R, 1]
    position = torch.arange(contexts.longest, device=spans.device)  # [L]
    length = prompt_length + response_length
    index = torch.where(position < prompt_length, prompt_start + position, response_start + position - prompt_length)
    attended = position < length
    if scoring.window:
        attended &= position >= length - scoring.window
    index = torch.where(attended, index, 0)  # [R, L]
    rows, heads, width = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(rows, kv_heads, heads // kv_heads, width).float()
    scores = torch.einsum("rgqd,rlgd->rgql", grouped, keys[index].float()) * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    weights = scores.masked_fill(~attended[:, None, None], float("-inf")).softmax(dim=-1)
    out = torch.einsum("rgql,rlgd->rgqd", weights, values[index].float())
    return out.reshape(rows, heads, -1).to(query.dtype)
