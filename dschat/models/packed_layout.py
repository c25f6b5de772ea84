"""Where the sequences of a packed micro-batch lie, and attention that stays inside each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# A bucket holds segments whose padding costs less than a call of its own.
_PADDING_FACTOR, _PADDING_TOKENS = 1.25, 16


@dataclass(frozen=True)
class Segment:
    """A run of tokens that attends to itself causally, and to all of `prefix` where there is one.

    Attributes:
        start, length: of the run in the packed row.
        prefix: (start, length) of the prompt that other segments may share; length 0: none.
    """

    start: int
    length: int
    prefix: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class _Bucket:
    """Adjacent segments of similar length: one rectangular attention call.

    Attributes:
        rows, columns: segments, and the longest of them.
        start, stop: their tokens in the packed row.
        queries: [rows · columns] long, index of each query in the bucket's tokens; None: all of the same length.
        real: [stop - start] long, index of each token among rows · columns; None as above.
        keys: [rows · (prefix + columns)] long, index in the packed row; None without prefixes.
        mask: [rows, 1, columns, prefix + columns] bool, True where attended; None: causal.
    """

    rows: int
    columns: int
    start: int
    stop: int
    queries: Tensor | None
    real: Tensor | None
    keys: Tensor | None
    mask: Tensor | None


class PackedLayout:
    """Segments of one packed row, cut into buckets for attention.

    Args:
        segments: in the order of their tokens, without gaps. A bucket holds adjacent segments, so order them by length.
        device: of the index tensors.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.segments = list(segments)
        self.tokens = sum(segment.length for segment in segments)
        self.buckets = [_bucket(part, device) for part in _similar(self.segments)]

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float) -> Tensor:
        """Attention of each segment to itself and its prefix.

        Args:
            query: [H, N, D]; key, value: [G, N, D], [G, N, Dv]; H is a multiple of G.

        Returns: [H, N, Dv]
        """
        sizes = [bucket.stop - bucket.start for bucket in self.buckets]
        # One split each: its backward is one concatenation, where every slice's would fill a tensor of all tokens.
        queries, keys, values = (tensor.split(sizes, dim=1) for tensor in (query, key, value))
        parts = [
            self._attend(bucket, q, k, v, (key, value), scale, dropout)
            for bucket, q, k, v in zip(self.buckets, queries, keys, values, strict=True)
        ]
        return torch.cat(parts, dim=1)

    @staticmethod
    def _attend(bucket: _Bucket, q: Tensor, k: Tensor, v: Tensor, whole: tuple[Tensor, Tensor], scale: float,
                dropout: float) -> Tensor:  # fmt: skip
        if bucket.keys is not None:
            k, v = (tensor.index_select(1, bucket.keys) for tensor in whole)
        elif bucket.queries is not None:
            k, v = (tensor.index_select(1, bucket.queries) for tensor in (k, v))
        if bucket.queries is not None:
            q = q.index_select(1, bucket.queries)
        q, k, v = (tensor.unflatten(1, (bucket.rows, -1)).transpose(0, 1) for tensor in (q, k, v))  # [rows, H, L, D]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bucket.mask, dropout_p=dropout, scale=scale, is_causal=bucket.mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        out = out.transpose(0, 1).flatten(1, 2)  # [H, rows · columns, Dv]
        return out if bucket.real is None else out.index_select(1, bucket.real)


def _similar(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Adjacent segments whose lengths differ little, with a prefix each or none."""
    parts: list[list[Segment]] = []
    low = high = 0
    for segment in segments:
        low, high = min(low, segment.length), max(high, segment.length)
        if not parts or bool(parts[-1][-1].prefix[1]) != bool(segment.prefix[1]) or (
            high > low * _PADDING_FACTOR + _PADDING_TOKENS
        ):
            parts.append([])
            low = high = segment.length
        parts[-1].append(segment)
    return parts


def _bucket(segments: Sequence[Segment], device: torch.device) -> _Bucket:
    start, stop = segments[0].start, segments[-1].start + segments[-1].length
    columns, prefix = max(s.length for s in segments), max(s.prefix[1] for s in segments)
    lengths = torch.tensor([s.length for s in segments])[:, None]
    starts = torch.tensor([s.start for s in segments])[:, None]
    column = torch.arange(columns)
    inside = column < lengths  # [rows, columns]
    own = torch.where(inside, starts + column, starts)  # padding repeats a token of the row; its result is dropped
    equal = bool(inside.all())
    queries = None if equal else (own - start).flatten().to(device)
    real = None if equal else inside.flatten().nonzero().squeeze(1).to(device)
    keys = mask = None
    if prefix:
        prefix_length = torch.tensor([s.prefix[1] for s in segments])[:, None]
        prefix_start = torch.tensor([s.prefix[0] for s in segments])[:, None]
        place = torch.arange(prefix)
        before = place < prefix_length  # [rows, prefix]
        shared = torch.where(before, prefix_start + place, prefix_start)
        keys = torch.cat([shared, own], dim=1).flatten().to(device)
        causal = torch.ones(columns, columns, dtype=torch.bool).tril().expand(len(segments), -1, -1)
        mask = torch.cat([before[:, None, :].expand(-1, columns, -1), causal], dim=2)[:, None].to(device)
    return _Bucket(len(segments), columns, start, stop, queries, real, keys, mask)
