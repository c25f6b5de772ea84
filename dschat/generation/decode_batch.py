"""The rows being decoded: a fixed number of places on the device, filled from a queue and emptied as rows end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.generation.host_tensors import to_device
from dschat.generation.kv_pool import UNUSED_TOKEN
from dschat.generation.request import Responses

# A place without a row attends to one token that nobody reads.
NO_ROW_SPAN = (UNUSED_TOKEN, 0, UNUSED_TOKEN, 1)


@dataclass
class DecodeBatch:
    """The first `used` of S places hold rows, in tensors whose addresses stay.

    Attributes:
        tokens: [S] long, the newest token of each row, which the model has not seen yet.
        spans: [S, 4] long, the row's context in the pool, see attention.decode_attention.
        cells: [S] long, where the row's next token is written, see Responses.
        ends: [S] long, the cell behind the row's last possible token.
        live: [S] bool, True while the row goes on.
        no_row: [4] long, NO_ROW_SPAN.
        rows: the prompt's number of each used place, known to the host.
    """

    tokens: Tensor
    spans: Tensor
    cells: Tensor
    ends: Tensor
    live: Tensor
    no_row: Tensor
    rows: list[int]

    @classmethod
    def empty(cls, count: int, device: torch.device) -> DecodeBatch:
        zeros = [torch.zeros(count, dtype=torch.long, device=device) for _ in range(3)]
        no_row = torch.tensor(NO_ROW_SPAN, device=device)
        live = torch.zeros(count, dtype=torch.bool, device=device)
        return cls(
            tokens=zeros[0], spans=no_row.repeat(count, 1), cells=zeros[1], ends=zeros[2], live=live, no_row=no_row,
            rows=[],
        )  # fmt: skip

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
        self.spans[:] = self.no_row

    def add(self, rows: list[int], spans: list[tuple[int, int, int]], limits: list[int], responses: Responses) -> slice:
        """Take rows in whose prompts are in the pool; spans: prompt start and length, response start of each."""
        places = slice(self.used, self.used + len(rows))
        entries = [(*span, 0, row, limit) for span, row, limit in zip(spans, rows, limits, strict=True)]
        table = to_device(entries, self.tokens.device)  # [n, 6]: span, row, limit
        first = responses.first_cell(table[:, 4])
        self.spans[places] = table[:, :4]
        self.cells[places] = first
        self.ends[places] = first + table[:, 5]
        self.live[places] = True
        self.rows += rows
        return places

    def advance(self, count: int) -> tuple[Tensor, Tensor]:
        """Make room for the newest token of the first places; tokens [count] and spans [count, 4] to run.

        A row that has ended runs as a place without a row: its own next token would lie in a neighbour's part.
        """
        live = self.live[:count]
        self.spans[:count, 3] += live
        return self.tokens[:count], torch.where(live.unsqueeze(1), self.spans[:count], self.no_row)

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
        live = self.live[: self.used].tolist()  # the only wait for the device
        if all(live):
            return []
        stay = [place for place, goes_on in enumerate(live) if goes_on]
        ended = [place for place, goes_on in enumerate(live) if not goes_on]
        gone = [self.rows[place] for place in ended]
        places, names = to_device([ended, gone], self.tokens.device)  # [n] each
        responses.counts[names] = self.cells[places] - responses.first_cell(names)
        order = to_device(stay, self.tokens.device)
        for tensor in (self.tokens, self.spans, self.cells, self.ends, self.live):
            tensor[: len(stay)] = tensor[order]
        self.live[len(stay) :] = False
        self.spans[len(stay) :] = self.no_row
        self.rows = [self.rows[place] for place in stay]
        return gone
