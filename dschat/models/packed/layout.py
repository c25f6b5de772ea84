"""Where the sequences of a packed row lie, and attention that stays inside each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

# Adjacent sequences share one attention call while padding them to the longest costs less than a call of their own.
_PADDING_FACTOR, _PADDING_TOKENS = 1.25, 16

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # q [B, H, L, D], k, v, mask → [B, H, L, Dv]
Visible = Callable[[Tensor, Tensor], Tensor]  # positions of queries and of keys, broadcast → bool, True where attended


@dataclass(frozen=True)
class Segment:
    """A run of tokens that attends to itself, and to all of `prefix` where there is one.

    Attributes:
        start, length: of the run in the packed row.
        prefix: (start, length) of a prompt that other segments may share; length 0: none.
    """

    start: int
    length: int
    prefix: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class SegmentGroups:
    """Segments in groups that share no keys: a prompt and the segments that go on from it, or one segment alone.

    Attributes:
        offsets: [groups + 1] long on the CPU, where each group starts in `spans`; groups are ordered by falling cost.
        spans: [segments, 3] long on the CPU: start and length in the packed row, and the length of the prefix, which is
            the group's first segment; 0: none.
        tokens: of all segments.
        longest: tokens of the longest sequence, prefix included.
    """

    offsets: Tensor
    spans: Tensor
    tokens: int
    longest: int


@dataclass(frozen=True)
class VariableLengths:
    """A packed row for kernels that take sequences of any lengths.

    Attributes:
        own_ends: [segments + 1] int32, 0 and the end of each segment in the packed row.
        longest_own: tokens of the longest segment.
        queries: [M] long, tokens of segments with a prefix, prompt by prompt; None: there are none.
        keys: [K] long, tokens of these prompts.
        query_ends, key_ends: [prompts + 1] int32, 0 and where the tokens of each prompt end in `queries` and `keys`.
        longest_query, longest_key: largest number of tokens of one prompt in `queries` and in `keys`.
    """

    own_ends: Tensor
    longest_own: int
    queries: Tensor | None = None
    keys: Tensor | None = None
    query_ends: Tensor | None = None
    key_ends: Tensor | None = None
    longest_query: int = 0
    longest_key: int = 0


@dataclass(frozen=True)
class Bucket:
    """Adjacent segments of similar length: one rectangular attention call.

    Attributes:
        tokens: their tokens in the packed row are the next `tokens` ones after those of the previous bucket.
        columns: length of the longest segment.
        prefixes: [rows] long on the CPU, length of each row's prefix.
        queries: [rows · columns] long, index of each query among the bucket's tokens; None: no padding is needed.
        real: [tokens] long, index of each token in rows · columns; None as above.
        keys: [rows · (prefix + columns)] long, index of each key in the packed row; None without prefixes.
    """

    tokens: int
    columns: int
    prefixes: Tensor
    queries: Tensor | None
    real: Tensor | None
    keys: Tensor | None

    def mask(self, visible: Visible) -> Tensor:
        """[rows, 1, columns, prefix + columns] bool, True where a query attends to a key."""
        place, before = torch.arange(int(self.prefixes.max())), self.prefixes[:, None]
        queries = before + torch.arange(self.columns)  # [rows, columns], positions in the sequence
        keys = torch.cat([place.expand(len(self.prefixes), -1), queries], dim=1)  # [rows, prefix + columns]
        real = torch.cat([place < before, torch.ones_like(queries, dtype=torch.bool)], dim=1)
        return (visible(queries[:, :, None], keys[:, None, :]) & real[:, None, :])[:, None]


class PackedLayout:
    """The segments of one packed row, and what attention over them needs.

    Args:
        segments: in the order of their tokens, without gaps. A bucket holds adjacent ones, so order them by length.
        device: of the index tensors.

    Attributes:
        longest: tokens of the longest sequence, prefix included.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device | str) -> None:
        self.device = device
        self._segments = list(segments)
        self.longest = max(segment.length + segment.prefix[1] for segment in segments)

    @cached_property
    def variable_lengths(self) -> VariableLengths:
        """The segments for kernels that take sequences of any lengths."""
        lengths = [segment.length for segment in self._segments]
        own_ends, longest = _ends(lengths, self.device), max(lengths)
        continued: dict[tuple[int, int], list[Segment]] = {}
        for segment in self._segments:
            if segment.prefix[1]:
                continued.setdefault(segment.prefix, []).append(segment)
        if not continued:
            return VariableLengths(own_ends, longest)
        queries = [[(segment.start, segment.length) for segment in segments] for segments in continued.values()]
        query_lengths = [sum(length for _, length in runs) for runs in queries]
        key_lengths = [length for _, length in continued]
        return VariableLengths(
            own_ends, longest, _tokens([run for runs in queries for run in runs], self.device),
            _tokens(list(continued), self.device), _ends(query_lengths, self.device), _ends(key_lengths, self.device),
            max(query_lengths), max(key_lengths),
        )  # fmt: skip

    @cached_property
    def groups(self) -> SegmentGroups:
        """The segments for a kernel that knows them."""
        members: dict[tuple[int, int], list[Segment]] = {}
        for segment in self._segments:
            first = segment.prefix if segment.prefix[1] else (segment.start, segment.length)
            members.setdefault(first, []).append(segment)
        groups = sorted(members.values(), key=_pairs, reverse=True)
        spans = [(segment.start, segment.length, segment.prefix[1]) for group in groups for segment in group]
        offsets = np.cumsum([0, *map(len, groups)])
        tokens = sum(segment.length for segment in self._segments)
        return SegmentGroups(torch.from_numpy(offsets), torch.tensor(spans), tokens, self.longest)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The segments for rectangular attention."""
        return [_bucket(part, self.device) for part in _similar(self._segments)]

    @cached_property
    def _causal(self) -> list[Tensor | None]:
        return self._masks_of(lambda q, k: k <= q, prefixes_only=True)

    def first_visible(self, visible: Visible | None) -> Tensor | None:
        """[longest] long on the CPU, the first position that each position attends to; None: the first of all.

        Args:
            visible: the model's attention pattern: every position attends to all from some position, which never
                decreases, up to itself, as in windows and chunks; None: causal.

        Raises: NotImplementedError for a pattern in which positions attend to later ones.
        """
        if visible is None:
            return None
        position = torch.arange(self.longest)
        if bool(visible(position[:-1], position[1:]).any()) or not bool(visible(position, position).all()):
            raise NotImplementedError("packed attention: this model's positions attend to later ones")
        low, high = torch.zeros_like(position), position.clone()  # high is attended to, all before low are not
        while bool((low < high).any()):
            middle = (low + high) // 2
            seen = visible(position, middle)
            low, high = torch.where(seen, low, middle + 1), torch.where(seen, middle, high)
        return high

    def window(self, visible: Visible | None) -> int | None:
        """Number of last positions that every position attends to, itself included; None: all.

        Raises: NotImplementedError for other patterns.
        """
        first = self.first_visible(visible)
        if first is None or not bool(first.any()):
            return None
        window = self.longest - int(first[-1])
        if not torch.equal(first, (torch.arange(self.longest) - window + 1).clamp(min=0)):
            raise NotImplementedError("packed attention: this model's mask is no window")
        return window

    def masks(self, visible: Visible | None) -> list[Tensor | None]:
        """The mask of each bucket; None for a causal one.

        Args:
            visible: the model's attention pattern, causality included; None: causal.
        """
        return self._causal if visible is None else self._masks_of(visible, prefixes_only=False)

    def _masks_of(self, visible: Visible, *, prefixes_only: bool) -> list[Tensor | None]:
        return [
            None if prefixes_only and bucket.keys is None else bucket.mask(visible).to(self.device)
            for bucket in self.buckets
        ]

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, masks: Sequence[Tensor | None], attend: Attention
    ) -> Tensor:
        """Attention of each segment to itself and its prefix.

        Args:
            query: [H, N, D]; key, value: [G, N, D], [G, N, Dv]; H is a multiple of G.
            masks: of `self.masks`.
            attend: attention over rectangular batches; causal where its mask is None.

        Returns: [H, N, Dv]
        """
        sizes = [bucket.tokens for bucket in self.buckets]
        # One split each: its backward is one concatenation, where every slice's would fill a tensor of all tokens.
        parts = zip(*(tensor.split(sizes, dim=1) for tensor in (query, key, value)), strict=True)
        outputs = [
            _attend(bucket, part, (key, value), mask, attend)
            for bucket, part, mask in zip(self.buckets, parts, masks, strict=True)
        ]
        return torch.cat(outputs, dim=1)


def _attend(
    bucket: Bucket, part: tuple[Tensor, Tensor, Tensor], row: tuple[Tensor, Tensor], mask: Tensor | None,
    attend: Attention,
) -> Tensor:  # fmt: skip
    """[H, tokens, Dv] of one bucket; `part` are its own queries, keys and values, `row` the keys and values of all."""
    q, k, v = part
    if bucket.keys is not None:
        k, v = (tensor.index_select(1, bucket.keys) for tensor in row)
    elif bucket.queries is not None:
        k, v = (tensor.index_select(1, bucket.queries) for tensor in (k, v))
    if bucket.queries is not None:
        q = q.index_select(1, bucket.queries)
    q, k, v = (tensor.unflatten(1, (len(bucket.prefixes), -1)).transpose(0, 1) for tensor in (q, k, v))
    out = attend(q, k, v, mask).transpose(0, 1).flatten(1, 2)  # [H, rows · columns, Dv]
    return out if bucket.real is None else out.index_select(1, bucket.real)


def _ends(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(device)


def _tokens(runs: Sequence[tuple[int, int]], device: torch.device | str) -> Tensor:
    """Indices of the tokens of runs (start, length)."""
    return torch.from_numpy(np.concatenate([np.arange(length) + start for start, length in runs])).to(device)


def _pairs(group: Sequence[Segment]) -> int:
    """Pairs of a query and a key: what attention costs."""
    return sum(segment.length * (segment.length + 2 * segment.prefix[1]) for segment in group)


def _similar(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Adjacent segments whose lengths differ little, all with a prefix or all without."""
    parts: list[list[Segment]] = []
    low = high = 0
    for segment in segments:
        low, high = min(low, segment.length), max(high, segment.length)
        if (
            not parts
            or bool(parts[-1][-1].prefix[1]) != bool(segment.prefix[1])
            or (high > low * _PADDING_FACTOR + _PADDING_TOKENS)
        ):
            parts.append([])
            low = high = segment.length
        parts[-1].append(segment)
    return parts


def _bucket(segments: Sequence[Segment], device: torch.device | str) -> Bucket:
    starts, lengths = (np.array([getattr(s, name) for s in segments])[:, None] for name in ("start", "length"))
    prefix_starts, prefixes = (np.array([s.prefix[i] for s in segments])[:, None] for i in (0, 1))
    column = np.arange(lengths.max())
    inside = column < lengths  # [rows, columns]
    own = np.where(inside, starts + column, starts)  # padding repeats a token of the row; its result is dropped
    queries = real = keys = None
    if not inside.all():
        queries, real = (own - starts[0]).ravel(), inside.ravel().nonzero()[0]
    if prefixes.any():
        place = np.arange(prefixes.max())
        shared = np.where(place < prefixes, prefix_starts + place, prefix_starts)
        keys = np.concatenate([shared, own], axis=1).ravel()
    indices = [None if index is None else torch.from_numpy(index).to(device) for index in (queries, real, keys)]
    return Bucket(int(lengths.sum()), len(column), torch.from_numpy(prefixes[:, 0]), *indices)
