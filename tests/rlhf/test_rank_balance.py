"""Groups move between ranks: shorter slowest rank, every row kept once, nothing moved without need."""

import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch

from dschat.rlhf.experience import Experience
from dschat.rlhf.updates import rank_balance
from dschat.rlhf.updates.rank_balance import WORTHWHILE, balance_over_ranks, group_tokens, moves_between_ranks


def sums_after(tokens, moves) -> list[int]:
    sums = [sum(rank) for rank in tokens]
    for source, group, destination in moves:
        sums[source] -= tokens[source][group]
        sums[destination] += tokens[source][group]
    return sums


@pytest.mark.parametrize("seed", range(40))
def test_the_slowest_rank_gets_shorter_and_no_rank_is_left_without_a_group(seed):
    trial = Random(seed)
    ranks, groups = trial.randint(2, 6), trial.randint(1, 12)
    tokens = [[min(512, 8 + int(trial.expovariate(1 / 60))) for _ in range(groups)] for _ in range(ranks)]
    moves = moves_between_ranks(tokens)
    before, after = [sum(rank) for rank in tokens], sums_after(tokens, moves)
    assert max(after) <= max(before) and sum(after) == sum(before)
    assert len({(source, group) for source, group, _ in moves}) == len(moves), "a group moves once"
    for rank in range(ranks):
        assert sum(move.source == rank for move in moves) < groups
    # No single further move from the longest to the shortest rank would help more than WORTHWHILE.
    longest, shortest = after.index(max(after)), after.index(min(after))
    left = [n for g, n in enumerate(tokens[longest]) if (longest, g) not in {(s, i) for s, i, _ in moves}]
    gains = [min(n, after[longest] - after[shortest] - n) for n in left]
    assert len(left) == 1 or max(gains) <= WORTHWHILE * sum(after) / ranks


def test_moves_by_hand():
    """100 + 60 + 20 and 40: half the difference of 140 is 70, 60 is nearest; then 120 and 100 are even enough."""
    assert moves_between_ranks([[100, 60, 20], [40]]) == [(0, 1, 1)]
    assert moves_between_ranks([[50, 50], [50, 50]]) == []
    assert moves_between_ranks([[1000], [1]]) == [], "the only group of a rank stays"


def minibatch(rank: int, response_lengths: list[int]) -> Experience:
    """Groups of two rows with a prompt of 3 tokens; scores identify the rows."""
    rows, width = len(response_lengths), max(response_lengths)
    response_mask = torch.arange(width) < torch.tensor(response_lengths)[:, None]
    attention_mask = torch.cat([torch.ones(rows, 3, dtype=torch.bool), response_mask], dim=1)
    scores = torch.arange(rows) + 100.0 * rank
    values = scores[:, None] * response_mask
    return Experience(
        sequences=torch.where(attention_mask, 5, 0), attention_mask=attention_mask, response_mask=response_mask,
        rollout_logprobs=values, scores=scores, has_score=scores >= 0, ended=scores >= 0, trained=scores >= 0,
        rewards=values, advantages=values,
    )  # fmt: skip


def test_tokens_of_a_group_count_its_prompt_once_and_no_untrained_rows():
    rows = minibatch(0, [2, 5, 7, 1])
    assert group_tokens(rows, 2).tolist() == [3 + 7, 3 + 8]
    rows.trained = torch.tensor([True, False, False, False])
    assert group_tokens(rows, 2).tolist() == [3 + 2, 0]


def test_every_row_is_on_one_rank_afterwards_with_its_group_and_its_tensors(monkeypatch):
    """Two ranks as threads: 3 + 80, 3 + 40, 3 + 20 and three times 3 + 4 tokens."""
    lengths = [[40, 40, 20, 20, 10, 10], [2, 2, 2, 2, 2, 2]]
    barrier, shared, local = threading.Barrier(2), [None, None], threading.local()

    def all_gather(value):
        shared[local.rank] = value
        barrier.wait()
        values = list(shared)
        barrier.wait()
        return values

    monkeypatch.setattr(rank_balance.collectives, "world_size", lambda: 2)
    monkeypatch.setattr(rank_balance.collectives, "rank", lambda: local.rank)
    monkeypatch.setattr(rank_balance.collectives, "all_gather_objects", all_gather)

    def run(rank):
        local.rank = rank
        return balance_over_ranks(minibatch(rank, lengths[rank]), group_size=2)

    with ThreadPoolExecutor(2) as threads:
        parts = list(threads.map(run, (0, 1)))
    tokens = [int(group_tokens(part, 2).sum()) for part in parts]
    assert tokens == [80, 90], "83 tokens go to the second rank, and two groups of 7 back"
    before = Experience.concatenate([minibatch(rank, lengths[rank]) for rank in (0, 1)])
    after = Experience.concatenate(parts)
    order, expected = after.scores.argsort(), before.scores.argsort()
    assert torch.equal(after.scores[order], before.scores[expected])
    for name in ("response_mask", "rewards", "sequences", "attention_mask"):
        assert torch.equal(getattr(after, name)[order], getattr(before, name)[expected]), name
    for part in parts:
        assert torch.equal(part.scores[0::2] + 1, part.scores[1::2]), "groups stay whole and in order"
