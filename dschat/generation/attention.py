"""Decoding attention: one query token per row against that row's context in the KV pool."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.generation.cpu import cpp_kernels
from dschat.generation.cuda import triton_kernels


def decode_attention(
    query: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    longest: int,
    kernels: bool = True,
) -> Tensor:
    """Write each row's newest key and value into the pool, then attend to the row's context.

    The context of a row is two runs of the pool: its prompt, which other rows may share, and its own response, which
    ends with the newest token. Only the context is read, so there is no mask and no padding.

    Args:
        query: [R, H, D]; H is a multiple of G, the key-value heads (grouped-query attention).
        new_key, new_value: [R, G, D], [R, G, Dv] of the newest token.
        keys, values: [N, G, D], [N, G, Dv] contiguous, the pool of one layer; written at the newest token's index.
        spans: [R, 4] long: start and length of the prompt, start and length (newest token included) of the response.
        scale: multiplies query · key.
        window: sliding window: attend only to the last `window` tokens; None: all.
        softcap: c in c · tanh(logit / c); None: none.
        longest: upper bound of the context lengths, as a host integer to avoid a device synchronisation.
        kernels: use the C++ or Triton kernels where available; else plain torch.

    Returns:
        [R, H, Dv] in the query's dtype, accumulated in float32.

    Source: Ainslie et al. 2023 (arXiv:2305.13245) for grouped queries; Dao 2023 (arXiv:2307.08691) for the online
        softmax of the CUDA kernel.
    """
    on_cpu = kernels and query.device.type == "cpu" and query.dtype in cpp_kernels.DTYPES
    if on_cpu and (library := cpp_kernels.load()):
        return library.decode_attention(
            query, new_key, new_value, keys, values, spans, scale=scale, window=window, softcap=softcap
        )
    newest = spans[:, 2] + spans[:, 3] - 1
    if kernels and query.is_cuda and triton_kernels.available(query):
        from dschat.generation.cuda import attention  # imports triton, which is optional

        attention.write_kv(keys, values, new_key, new_value, newest)
        return attention.decode_attention(
            query, keys, values, spans, longest=longest, scale=scale, window=window, softcap=softcap
        )
    keys.index_copy_(0, newest, new_key)
    values.index_copy_(0, newest, new_value)
    return plain_attention(query, keys, values, spans, scale=scale, window=window, softcap=softcap, longest=longest)


def plain_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    longest: int,
) -> Tensor:
    """The same in plain torch, by gathering padded contexts: for any device, and the reference for the kernels."""
    prompt_start, prompt_length, response_start, response_length = spans.T.unsqueeze(-1)  # each [R, 1]
    place = torch.arange(longest, device=spans.device)  # [L]
    context = prompt_length + response_length
    index = torch.where(place < prompt_length, prompt_start + place, response_start + place - prompt_length)
    seen = place < context
    if window:
        seen &= place >= context - window
    index = torch.where(seen, index, 0)  # [R, L]
    rows, heads, width = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(rows, kv_heads, heads // kv_heads, width).float()
    logits = torch.einsum("rgqd,rlgd->rgql", grouped, keys[index].float()) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    weights = logits.masked_fill(~seen[:, None, None], float("-inf")).softmax(dim=-1)
    out = torch.einsum("rgql,rlgd->rgqd", weights, values[index].float())
    return out.reshape(rows, heads, -1).to(query.dtype)
