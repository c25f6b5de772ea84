"""The real tokens of a padded batch as one row without padding, shared prompts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.models.packed_layout import PackedLayout, Segment


@dataclass(frozen=True)
class SharedPrompt:
    """Adjacent rows of a batch that start with the same prompt.

    Attributes:
        first, rows: the first of the rows, and their number.
        length: tokens of the prompt; every row is longer.
    """

    first: int
    rows: int
    length: int


@dataclass(frozen=True)
class PackedRows:
    """A padded batch [B, S] as one row of N tokens.

    Attributes:
        tokens: [N] long, index of each packed token in the flattened [B·S] batch.
        position_ids: [1, N] long, counted from the start of each sequence.
        source: [B, S] long, index of each column's token in the packed row; 0 where attention_mask is False.
        layout: the sequences, for attention.
    """

    tokens: Tensor
    position_ids: Tensor
    source: Tensor
    layout: PackedLayout


def pack_rows(
    attention_mask: Tensor, *, starts: Tensor | None = None, shared: Sequence[SharedPrompt] = ()
) -> PackedRows:
    """Pack a batch; segments lie in the order of their lengths, prompts that are shared before everything else.

    Reads attention_mask on the host: one synchronisation with a device.

    Args:
        attention_mask: [B, S] bool, True on real tokens, which are adjacent in each row; at least one per row.
        starts: [B, S] bool, True where a conversation starts, in rows that hold several; None: one per row.
        shared: prompts of several rows; computed once. Without `starts`.
    """
    device = attention_mask.device
    batch, width = attention_mask.shape
    lengths = attention_mask.sum(dim=1).tolist()
    first = attention_mask.int().argmax(dim=1).tolist()  # column of the first real token
    prompts = {row: prompt for prompt in shared for row in range(prompt.first, prompt.first + prompt.rows)}
    runs: list[tuple[int, int, int, SharedPrompt | None]] = []  # row, column, length, prompt before it
    for row in range(batch):
        prompt = prompts.get(row)
        column, stop = first[row], first[row] + lengths[row]
        if prompt is not None:
            runs.append((row, column + prompt.length, lengths[row] - prompt.length, prompt))
            continue
        cuts = [column, stop]
        if starts is not None:
            cuts = [column, *(c for c in starts[row].nonzero().flatten().tolist() if column < c < stop), stop]
        runs += [(row, begin, end - begin, None) for begin, end in zip(cuts, cuts[1:], strict=False)]
    runs.sort(key=lambda run: (run[3] is not None, run[2]))
    segments, tokens, positions = [], [], []
    source = torch.zeros(batch, width, dtype=torch.long)
    packed = 0
    prompt_starts: dict[int, int] = {}
    for prompt in sorted(shared, key=lambda prompt: prompt.length):
        prompt_starts[prompt.first] = packed
        segments.append(Segment(packed, prompt.length))
        begin = prompt.first * width + first[prompt.first]
        tokens.append(torch.arange(begin, begin + prompt.length))
        positions.append(torch.arange(prompt.length))
        for row in range(prompt.first, prompt.first + prompt.rows):
            source[row, first[row] : first[row] + prompt.length] = torch.arange(packed, packed + prompt.length)
        packed += prompt.length
    for row, column, length, prompt in runs:
        before = 0 if prompt is None else prompt.length
        prefix = (0, 0) if prompt is None else (prompt_starts[prompt.first], prompt.length)
        segments.append(Segment(packed, length, prefix))
        tokens.append(torch.arange(row * width + column, row * width + column + length))
        positions.append(torch.arange(before, before + length))
        source[row, column : column + length] = torch.arange(packed, packed + length)
        packed += length
    return PackedRows(
        tokens=torch.cat(tokens).to(device),
        position_ids=torch.cat(positions)[None].to(device),
        source=source.to(device),
        layout=PackedLayout(segments, device),
    )
