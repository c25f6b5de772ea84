"""DecodeBatch: a fixed number of decode slots on the device, filled from a queue and freed as rows end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.generation.host_tensors import to_device
from dschat.generation.kv_pool.pool import UNUSED_INDEX
from dschat.generation.request import Responses

# An empty slot attends to one dummy token, and its output is ignored.
EMPTY_SPAN = (UNUSED_INDEX, 0, UNUSED_INDEX, 1)


@dataclass
class DecodeBatch:
    """State of S decode slots, of which the first `used` hold rows; the tensors keep their addresses.

    Attributes:
        tokens: [S] long, the newest token of each row, the input of the next step.
        spans: [S, 4] long, the row's context in the pool (see kv_pool.attention).
        next_index: [S] long, flat index at which the row's next token is written (see Responses).
        ends: [S] long, one past the flat index of the row's last allowed token.
        live: [S] bool, True until the row has ended.
        empty_span: [4] long, EMPTY_SPAN.
        rows: prompt index of each used slot, on the host.
    """

    tokens: Tensor
    spans: Tensor
    next_index: Tensor
    ends: Tensor
    live: Tensor
    empty_span: Tensor
    rows: list[int]

    @classmethod
    def empty(cls, count: int, device: torch.device) -> DecodeBatch:
        zeros = [torch.zeros(count, dtype=torch.long, device=device) for _ in range(3)]
        empty_span = torch.tensor(EMPTY_SPAN, device=device)
        live = torch.zeros(count, dtype=torch.bool, device=device)
        return cls(
            tokens=zeros[0], spans=empty_span.repeat(count, 1), next_index=zeros[1], ends=zeros[2], live=live,
            empty_span=empty_span, rows=[],
        )  # fmt: skip

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def used(self) -> int:
        return len(self.rows)

    def reset(self) -> None:
        """Empty all slots."""
        self.rows = []
        self.live.fill_(False)
        self.spans[:] = self.empty_span

    def add(self, rows: list[int], spans: list[tuple[int, int, int]], limits: list[int], responses: Responses) -> slice:
        """Add rows whose prompts are in the pool; spans: (prompt start, prompt length, response start) of each."""
        slots = slice(self.used, self.used + len(rows))
        entries = [(*span, 0, row, limit) for span, row, limit in zip(spans, rows, limits, strict=True)]
        table = to_device(entries, self.tokens.device)  # [n, 6]: span, row, limit
        first = responses.first_index(table[:, 4])
        self.spans[slots] = table[:, :4]
        self.next_index[slots] = first
        self.ends[slots] = first + table[:, 5]
        self.live[slots] = True
        self.rows += rows
        return slots

    def advance(self, count: int) -> tuple[Tensor, Tensor]:
        """Extend the spans of the first `count` slots by one token; returns tokens [count] and spans [count, 4].

        An ended row runs as an empty slot: its next token would overwrite pool space of another row.
        """
        live = self.live[:count]
        self.spans[:count, 3] += live
        return self.tokens[:count], torch.where(live.unsqueeze(1), self.spans[:count], self.empty_span)

    def write(self, slots: slice, tokens: Tensor, logprobs: Tensor, responses: Responses, stop_ids: Tensor) -> None:
        """Store the sampled tokens of these slots and update which rows have ended."""
        live, next_index = self.live[slots], self.next_index[slots]
        written = torch.where(live, next_index, responses.discard_index)
        responses.tokens[written] = tokens
        responses.logprobs[written] = logprobs
        next_index += live
        self.tokens[slots] = tokens
        live &= next_index < self.ends[slots]
        if len(stop_ids):
            live &= ~torch.isin(tokens, stop_ids)

    def write_indices(self, slots: slice, responses: Responses) -> Tensor:
        """Flat indices in Responses at which the next tokens of these slots are written, [n] long."""
        return torch.where(self.live[slots], self.next_index[slots], responses.discard_index)

    def remove_finished(self, responses: Responses) -> list[int]:
        """Remove finished rows and compact the others to the front; returns the removed rows."""
        live = self.live[: self.used].tolist()  # the only host synchronisation
        if all(live):
            return []
        live_slots = [slot for slot, is_live in enumerate(live) if is_live]
        ended_slots = [slot for slot, is_live in enumerate(live) if not is_live]
        ended_rows = [self.rows[slot] for slot in ended_slots]
        slots, rows = to_device([ended_slots, ended_rows], self.tokens.device)  # [n] each
        responses.lengths[rows] = self.next_index[slots] - responses.first_index(rows)
        kept_slots = to_device(live_slots, self.tokens.device)
        count = len(live_slots)
        for tensor in (self.tokens, self.spans, self.next_index, self.ends, self.live):
            tensor[:count] = tensor[kept_slots]
        self.live[count:] = False
        self.spans[count:] = self.empty_span
        self.rows = [self.rows[slot] for slot in live_slots]
        return ended_rows
