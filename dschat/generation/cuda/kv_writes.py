"""Triton kernel that writes the newest keys and values into the KV pool.

Importing this module needs triton: check triton_kernels.available() first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def write_kv(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, destination: Tensor) -> None:
    """Write one token of each row into the pool, in offset: keys[destination[r]] = new_keys[r], likewise the values.

    Args:
        keys: [N, KVH, D], values: [N, KVH, Dv]: the pool of a layer.
        new_keys: [R, KVH, D], new_values: [R, KVH, Dv]; the last dimension of all four is contiguous.
        destination: [R] long, in [0, N), all different.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    (rows, kv_heads, width), value_width = new_keys.shape, new_values.shape[2]
    fits = keys.shape[1:] == new_keys.shape[1:] and values.shape[1:] == (kv_heads, value_width)
    if not fits or new_values.shape[:2] != (rows, kv_heads) or destination.shape != (rows,):
        raise ValueError(
            f"new_keys {tuple(new_keys.shape)}, new_values {tuple(new_values.shape)} and destination "
            f"{tuple(destination.shape)} do not fit keys {tuple(keys.shape)} and values {tuple(values.shape)}: a pool "
            "[N, KVH, D] takes [R, KVH, D] at [R]."
        )
    require_contiguous_vectors(keys=keys, values=values, new_keys=new_keys, new_values=new_values)
    _write[(rows, kv_heads)](
        keys, values, new_keys, new_values, destination,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        new_keys.stride(0), new_keys.stride(1), new_values.stride(0), new_values.stride(1), destination.stride(0),
        WIDTH=width, VALUE_WIDTH=value_width, TILE=triton.next_power_of_2(max(width, value_width)), num_warps=1,
    )  # fmt: skip


def require_contiguous_vectors(**tensors: Tensor) -> None:
    """Raise a ValueError that names a tensor whose last dimension is not contiguous."""
    for name, x in tensors.items():
        if x.stride(-1) != 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} in its last dimension, but it must be 1: .contiguous()")


@triton.jit
def _write(
    keys, values, new_keys, new_values, destination,
    key_stride, key_head_stride, value_stride, value_head_stride,
    new_key_stride, new_key_head_stride, new_value_stride, new_value_head_stride, destination_stride,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write one head of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token = tl.load(destination + row * destination_stride)
    d = tl.arange(0, TILE)
    key = tl.load(new_keys + row * new_key_stride + head * new_key_head_stride + d, mask=d < WIDTH)
    value = tl.load(new_values + row * new_value_stride + head * new_value_head_stride + d, mask=d < VALUE_WIDTH)
    tl.store(keys + token * key_stride + head * key_head_stride + d, key.to(keys.dtype.element_ty), mask=d < WIDTH)
    offset = token * value_stride + head * value_head_stride + d
    tl.store(values + offset, value.to(values.dtype.element_ty), mask=d < VALUE_WIDTH)
