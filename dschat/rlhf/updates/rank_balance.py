"""Balances a minibatch over ranks: groups of responses move from the longest to the shortest shares of tokens.

Rollouts differ in length, and every rank waits for the slowest one in each optimizer step. The step itself does not
depend on which rank holds a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dschat.distributed import collectives, groups
from dschat.rlhf.experience import Experience

# A move must shorten the slowest rank by this share of the mean; less is not worth the communication.
WORTHWHILE = 0.02


class Move(NamedTuple):
    """Group `group` of rank `source`, counted in its original order, goes to rank `destination`."""

    source: int
    group: int
    destination: int


def moves_between_ranks(tokens: Sequence[Sequence[int]]) -> list[Move]:
    """The moves that bring the largest sum of a rank close to the mean; every rank keeps a group of its own.

    Greedy: from the rank with the most tokens to the one with the fewest, the group nearest to half their difference.

    Args:
        tokens: of each group of each rank.
    """
    sums, remaining = [sum(rank) for rank in tokens], [dict(enumerate(rank)) for rank in tokens]
    least = WORTHWHILE * sum(sums) / len(sums)
    moves: list[Move] = []
    while True:
        source, destination = sums.index(max(sums)), sums.index(min(sums))
        difference = sums[source] - sums[destination]
        # After moving n tokens the larger of the two has max(sum − n, sum' + n): shorter by min(n, difference − n).
        gains = {group: min(n, difference - n) for group, n in remaining[source].items()}
        group = max(gains, key=lambda group: (gains[group], -group))
        if gains[group] <= least or len(remaining[source]) == 1:
            return moves
        n = remaining[source].pop(group)
        sums[source], sums[destination] = sums[source] - n, sums[destination] + n
        moves.append(Move(source, group, destination))


def balance_over_ranks(minibatch: Experience, *, group_size: int) -> Experience:
    """The minibatch of this rank after groups have moved between ranks. A collective.

    Args:
        group_size: responses per prompt, in consecutive rows, which stay together.
    """
    if collectives.world_size() == 1 or groups.sequence_parallel_size() > 1:
        return minibatch
    rank, device = collectives.rank(), minibatch.sequences.device
    moves = moves_between_ranks(collectives.all_gather_objects(group_tokens(minibatch, group_size).tolist()))
    if not moves:
        return minibatch
    sent = {move.group: minibatch.rows(_rows([move.group], group_size)) for move in moves if move.source == rank}
    on_cpu = {group: {name: tensor.cpu() for name, tensor in part.tensors().items()} for group, part in sent.items()}
    received = collectives.all_gather_objects(on_cpu)
    kept = [group for group in range(len(minibatch) // group_size) if group not in sent]
    parts = [minibatch.rows(_rows(kept, group_size))]
    for move in moves:
        if move.destination == rank:
            tensors = received[move.source][move.group]
            parts.append(Experience(**{name: tensor.to(device) for name, tensor in tensors.items()}))
    return Experience.concatenate(parts)


def group_tokens(minibatch: Experience, group_size: int) -> Tensor:
    """[groups] long: tokens that a step computes of each group, its prompt once; 0 for rows that are not trained."""
    trained = minibatch.trained_mask.any(dim=1)
    responses = (minibatch.response_mask.sum(dim=1) * trained).view(-1, group_size).sum(dim=1)
    prompts = torch.where(trained, minibatch.prompt_lengths, 0).view(-1, group_size).amax(dim=1)
    return responses + prompts


def _rows(group_indices: Sequence[int], group_size: int) -> Tensor:
    """Row indices of these groups."""
    return (torch.tensor(group_indices)[:, None] * group_size + torch.arange(group_size)).flatten()
