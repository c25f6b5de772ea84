"""The rows being decoded: a fixed number of places on the device, filled from a queue and emptied as rows end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.generation.kv_pool import UNUSED_TOKEN
from dschat.generation.request import Responses

# A place without a row attends to one token that nobody reads.
NO_ROW_SPAN = (UNUSED_TOKEN, 0, UNUSED_TOKEN, 1)


@dataclass
class Slots:
    """The first `used` of S places hold rows, in tensors whose addresses stay.

    Attributes:
        tokens: [S] long, the newest token of each row, which the model has not seen yet.
        spans: [S, 4] long, the row's context in the pool, see attention.decode_attention.
        cells: [S] long, where the row's next token is written, see Responses.
        ends: [S] long, the cell behind the row's last possible token.
        live: [S] bool, True while the row goes on.
        rows: the prompt's number of each used place, known to the host.
    """

    tokens: Tensor
    spans: Tensor
    cells: Tensor
    ends: Tensor
    live: Tensor
    rows: list[int]

    @classmethod
    def empty(cls, count: int, device: torch.device) -> Slots:
        zeros = [torch.zeros(count, dtype=torch.long, device=device) for _ in range(3)]
        spans = torch.tensor(NO_ROW_SPAN, device=device).repeat(count, 1)
        live = torch.zeros(count, dtype=torch.bool, device=device)
        return cls(tokens=zeros[0], spans=spans, cells=zeros[1], ends=zeros[2], live=live, rows=[])

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def used(self) -> int:
        return len(self.rows)

    def reset(self) -> None:
        """No rows."""
        self.rows = []
        self.live.fill_(False)
        self.spans[:] = torch.tensor(NO_ROW_SPAN, device=self.spans.device)

    def add(self, rows: list[int], spans: list[tuple[int, int, int]], limits: list[int], responses: Responses) -> slice:
        """Take rows in whose prompts are in the pool; spans: prompt start and length, response start of each."""
        device = self.tokens.device
        places = slice(self.used, self.used + len(rows))
        first = responses.first_cell(torch.tensor(rows, device=device))
        self.spans[places] = torch.tensor([(*span, 0) for span in spans], device=device)
        self.cells[places] = first
        self.ends[places] = first + torch.tensor(limits, device=device)
        self.live[places] = True
        self.rows += rows
        return places

    def advance(self, count: int) -> tuple[Tensor, Tensor]:
        """Make room for the newest token of the first places; tokens [count] and spans [count, 4] to run."""
        self.spans[:count, 3] += self.live[:count]
        return self.tokens[:count], self.spans[:count]

    def write(self, places: slice, tokens: Tensor, logprobs: Tensor, responses: Responses, stops: Tensor) -> None:
        """Note what was drawn for some places, and which rows it ends."""
        live, cells = self.live[places], self.cells[places]
        wanted = torch.where(live, cells, responses.unwanted)
        responses.tokens[wanted] = tokens
        responses.logprobs[wanted] = logprobs
        cells += live
        self.tokens[places] = tokens
        live &= cells < self.ends[places]
        if len(stops):
            live &= ~torch.isin(tokens, stops)

    def next_cells(self, places: slice, responses: Responses) -> Tensor:
        """Where the next tokens of some places go, [n] long."""
        return torch.where(self.live[places], self.cells[places], responses.unwanted)

    def leave(self, responses: Responses) -> list[int]:
        """Let finished rows go, the others close ranks; the rows that left."""
        live = self.live[: self.used]
        stay = live.nonzero().squeeze(1)
        if len(stay) == self.used:
            return []
        gone = [row for row, goes_on in zip(self.rows, live.tolist(), strict=True) if not goes_on]
        self.rows = [self.rows[place] for place in stay.tolist()]
        ended = (~live).nonzero().squeeze(1)
        names = torch.tensor(gone, device=live.device)
        responses.counts[names] = self.cells[ended] - responses.first_cell(names)
        for tensor in (self.tokens, self.spans, self.cells, self.ends, self.live):
            tensor[: len(stay)] = tensor[stay]
        self.live[len(stay) :] = False
        self.spans[len(stay) :] = torch.tensor(NO_ROW_SPAN, device=live.device)
        return gone
