"""The real tokens of a padded batch as one row without padding, with prompts that rows share only once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dschat.models.packed.layout import PackedLayout, Segment


@dataclass(frozen=True)
class PackedRows:
    """A padded batch [B, S] as one row of N tokens.

    Attributes:
        tokens: [N] long, index of each packed token in the flattened batch [B · S].
        position_ids: [1, N] long, counted from the start of each sequence.
        source: [B · S] long, index of each column's token in the packed row; 0 where attention_mask is False.
        layout: the sequences, for attention.
    """

    tokens: Tensor
    position_ids: Tensor
    source: Tensor
    layout: PackedLayout


@dataclass(frozen=True)
class _Run:
    """Adjacent tokens of the batch that are packed together.

    Attributes:
        row, column, length: of the tokens in the batch.
        prompt: of the prompt that comes before them, in another run; None: they start a sequence.
        copies: the rows that hold the same tokens in the same place of their sequence.
    """

    row: int
    column: int
    length: int
    prompt: _Run | None = None
    copies: Sequence[int] = ()


def pack_rows(
    attention_mask: Tensor, *, starts: Tensor | None = None, prompts: Sequence[tuple[Sequence[int], int]] = ()
) -> PackedRows:
    """Pack a batch. Prompts that are shared come first, then segments in the order of their lengths.

    Args:
        attention_mask: [B, S] bool, True on real tokens, which are adjacent in each row. It is read on the host: one
            synchronisation with a device.
        starts: [B, S] bool, True where a conversation starts, in rows that hold several; None: one per row.
        prompts: rows that start with the same tokens, and the number of these; they are computed once.
    """
    mask = attention_mask.cpu().numpy()
    width, device = mask.shape[1], attention_mask.device
    lengths, first = mask.sum(axis=1), mask.argmax(axis=1)
    runs = _runs(lengths, first, starts=None if starts is None else starts.cpu().numpy(), prompts=prompts)
    segments, tokens, positions, begins = [], [], [], {}
    source = np.zeros(mask.shape, dtype=np.int64)
    packed = 0
    for run in runs:
        before = 0 if run.prompt is None else run.prompt.length
        prefix = (0, 0) if run.prompt is None else (begins[id(run.prompt)], before)
        begins[id(run)] = packed
        segments.append(Segment(packed, run.length, prefix))
        tokens.append(np.arange(run.length) + run.row * width + run.column)
        positions.append(np.arange(run.length) + before)
        offset = run.column - first[run.row]
        for row in run.copies or [run.row]:
            source[row, first[row] + offset : first[row] + offset + run.length] = np.arange(packed, packed + run.length)
        packed += run.length
    return PackedRows(
        tokens=torch.from_numpy(np.concatenate(tokens)).to(device),
        position_ids=torch.from_numpy(np.concatenate(positions))[None].to(device),
        source=torch.from_numpy(source.ravel()).to(device),
        layout=PackedLayout(segments, device),
    )


def _runs(
    lengths: np.ndarray, first: np.ndarray, *, starts: np.ndarray | None,
    prompts: Sequence[tuple[Sequence[int], int]],
) -> list[_Run]:  # fmt: skip
    """Shared prompts by length, then all other tokens: those of whole sequences before continuations of prompts."""
    shared = [_Run(rows[0], int(first[rows[0]]), length, copies=rows) for rows, length in prompts]
    prompt_of = {row: prompt for prompt in shared for row in prompt.copies}
    rest = []
    for row, (length, column) in enumerate(zip(lengths.tolist(), first.tolist(), strict=True)):
        prompt = prompt_of.get(row)
        begin, stop = column + (prompt.length if prompt else 0), column + length
        cuts = [] if starts is None else [cut for cut in starts[row].nonzero()[0].tolist() if begin < cut < stop]
        edges = [begin, *cuts, stop]
        rest += [_Run(row, a, b - a, prompt) for a, b in zip(edges, edges[1:], strict=False) if b > a]
    rest.sort(key=lambda run: (run.prompt is not None, run.length))
    return sorted(shared, key=lambda run: run.length) + rest


def prompt_lengths_of(loss_mask: Tensor, attention_mask: Tensor) -> Tensor:
    """[B] long: real tokens before the first one of the loss, in [B, S] masks; 0 in rows without any."""
    return (loss_mask.int().argmax(dim=1) - attention_mask.int().argmax(dim=1)).clamp(min=0)


def shared_prompts(input_ids: Tensor, attention_mask: Tensor, prompt_lengths: Tensor) -> list:
    """Rows with the same prompt, for pack_rows: pairs of rows (at least two) and prompt length.

    Args:
        input_ids: [B, S] long; attention_mask: [B, S] bool, True on real tokens, which are adjacent in each row.
        prompt_lengths: [B] long, leading real tokens that may be shared; 0: none.
    """
    ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy()
    lengths = prompt_lengths.tolist()
    groups: dict[bytes, list[int]] = {}
    for row, (first, length) in enumerate(zip(mask.argmax(axis=1), lengths, strict=True)):
        if length:
            groups.setdefault(ids[row, first : first + length].tobytes(), []).append(row)
    return [(rows, lengths[rows[0]]) for rows in groups.values() if len(rows) > 1]
