"""Attention over packed rows against a dense mask, and the bookkeeping of packed rows against plain lists."""

import random
from functools import partial

import pytest
import torch
from packed_segments import PATTERNS, dense_attention, dense_mask, places, random_segments
from torch.nn import functional as F

from dschat.models.packed.layout import PackedLayout, Segment
from dschat.models.packed.rectangular_attention import sdpa, transformed_attention
from dschat.models.packed.rows import pack_rows, prompt_lengths_of, shared_prompts

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 8, 0.3


def random_inputs(size: int, *, value_width: int = WIDTH) -> list[torch.Tensor]:
    shapes = (HEADS, size, WIDTH), (GROUPS, size, WIDTH), (GROUPS, size, value_width)
    return [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in shapes]


def assert_same_outputs_and_gradients(actual, expected, inputs, case):
    torch.testing.assert_close(actual, expected, msg=lambda m: f"{case}: {m}")
    direction = torch.randn_like(expected)
    gradients = [torch.autograd.grad((output * direction).sum(), inputs) for output in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda m: f"{case}, gradient: {m}")


@pytest.mark.parametrize("name", PATTERNS)
def test_attention_over_a_packed_row_equals_a_dense_mask(name):
    trial = random.Random(name)
    torch.manual_seed(0)
    for number in range(12):
        segments = random_segments(trial)
        inputs = random_inputs(segments[-1].start + segments[-1].length, value_width=trial.choice([4, WIDTH]))
        layout = PackedLayout(segments, "cpu")
        attend = partial(sdpa, scale=SCALE, dropout=0.0)
        actual = layout.attention(*inputs, masks=layout.masks(PATTERNS[name]), attend=attend)
        expected = dense_attention(*inputs, dense_mask(segments, PATTERNS[name]), scale=SCALE)
        assert_same_outputs_and_gradients(actual, expected, inputs, (number, segments))
        assert layout.longest == max(len(places(segment)) for segment in segments)


@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.parametrize("transform", ["softcap", "sinks"])
def test_attention_with_capped_logits_or_sinks_equals_a_dense_mask(name, transform):
    trial = random.Random(f"{name} {transform}")
    torch.manual_seed(1)
    for number in range(5):
        segments = random_segments(trial)
        inputs = random_inputs(segments[-1].start + segments[-1].length)
        sinks = torch.randn(HEADS, dtype=torch.double, requires_grad=True)
        options = {"softcap": {"softcap": 0.7, "sinks": None}, "sinks": {"softcap": None, "sinks": sinks}}[transform]
        layout = PackedLayout(segments, "cpu")
        attend = partial(transformed_attention, scale=SCALE, dropout=0.0, **options)
        actual = layout.attention(*inputs, masks=layout.masks(PATTERNS[name]), attend=attend)
        expected = dense_attention(*inputs, dense_mask(segments, PATTERNS[name]), scale=SCALE, **options)
        # The softmax of this implementation is in float32.
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
        direction, trained = torch.randn_like(expected), [*inputs, *([sinks] if transform == "sinks" else [])]
        pairs = [torch.autograd.grad((output * direction).sum(), trained) for output in (actual, expected)]
        for ours, theirs in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4, msg=lambda m, n=number: f"{n}: {m}")


def test_segments_of_similar_length_share_a_call_and_others_do_not():
    """30 and 31 may be one rectangle; beside a prompt of 200 it would be mostly padding."""
    calls = []

    def attend(q, k, v, mask):
        calls.append((tuple(q.shape), tuple(k.shape), mask is None))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

    segments = [Segment(0, 30), Segment(30, 31), Segment(61, 200), Segment(261, 9, (61, 200)), Segment(270, 9)]
    layout = PackedLayout(segments, "cpu")
    q = torch.randn(2, 279, 4)
    layout.attention(q, q, q, masks=layout.masks(None), attend=attend)
    shapes = [((2, 31), (2, 31)), ((1, 200), (1, 200)), ((1, 9), (1, 209)), ((1, 9), (1, 9))]
    assert [((q[0], q[2]), (k[0], k[2])) for q, k, _ in calls] == shapes
    assert [causal for _, _, causal in calls] == [True, True, False, True], "no mask where the kernel knows it"


def random_batch(trial: random.Random) -> tuple[torch.Tensor, torch.Tensor, list[list[int]], list[int]]:
    """ids and mask of groups with equal prompts, padded left, right or on both sides; rows and prompt lengths.

    Some responses are empty, some prompts occur once, some rows have no known prompt.
    """
    rows, prompts = [], []
    for _ in range(trial.randint(1, 4)):
        prompt = [trial.randrange(50) for _ in range(trial.randint(1, 9))]
        for _ in range(trial.randint(1, 4)):
            known = trial.random() < 0.8
            rows.append(prompt + [trial.randrange(50) for _ in range(trial.randint(0 if known else 1, 12))])
            prompts.append(len(prompt) if known else 0)
    order = trial.sample(range(len(rows)), len(rows))
    rows, prompts = [rows[i] for i in order], [prompts[i] for i in order]
    width = max(map(len, rows)) + trial.randint(0, 3)
    ids, mask = torch.full((len(rows), width), 99), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        padding = width - len(row)
        left = {"left": padding, "right": 0, "both": trial.randint(0, padding)}[trial.choice(["left", "right", "both"])]
        ids[i, left : left + len(row)], mask[i, left : left + len(row)] = torch.tensor(row), True
    return ids, mask, rows, prompts


def recorded_segments(monkeypatch) -> list[Segment]:
    """Filled with the segments of the next pack_rows."""
    from dschat.models.packed import rows as packed_rows

    segments: list[Segment] = []

    def layout(given, device):
        segments[:] = given
        return PackedLayout(given, device)

    monkeypatch.setattr(packed_rows, "PackedLayout", layout)
    return segments


@pytest.mark.parametrize("seed", range(40))
def test_every_real_token_is_packed_once_and_every_row_finds_its_own_sequence(seed, monkeypatch):
    trial = random.Random(seed)
    ids, mask, rows, prompts = random_batch(trial)
    segments = recorded_segments(monkeypatch)
    groups = shared_prompts(ids, mask, torch.tensor(prompts))
    packed = pack_rows(mask, prompts=groups)
    tokens, source, positions = packed.tokens.tolist(), packed.source.view_as(ids), packed.position_ids[0].tolist()
    # A prompt of n rows is packed once instead of n times.
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        if prompt:
            by_prompt.setdefault(tuple(row[:prompt]), []).append(i)
    saved = sum(len(prompt) * (len(members) - 1) for prompt, members in by_prompt.items())
    assert sorted((sorted(members), length) for members, length in groups) == sorted(
        (members, len(prompt)) for prompt, members in by_prompt.items() if len(members) > 1
    )
    assert len(tokens) == len(set(tokens)) == sum(map(len, rows)) - saved
    assert all(mask.flatten()[token] for token in tokens)
    # A row's columns lead to packed tokens with its ids, at its positions.
    for i, row in enumerate(rows):
        own = source[i][mask[i]].tolist()
        assert [ids.flatten()[tokens[place]].item() for place in own] == row
        assert [positions[place] for place in own] == list(range(len(row)))
    assert not source[~mask].any()
    # Attention: the sequence of a segment is the beginning of each row that reads it.
    assert [s.start for s in segments] == [0, *torch.tensor([s.length for s in segments]).cumsum(0).tolist()[:-1]]
    owner = {place: segment for segment in segments for place in range(segment.start, segment.start + segment.length)}
    for i in range(len(rows)):
        own = source[i][mask[i]].tolist()
        for position, place in enumerate(own):
            assert places(owner[place])[: position + 1] == own[: position + 1], (i, position)


def test_rows_of_several_conversations_are_packed_as_one_sequence_each(monkeypatch):
    """Rows of 2 + 3 and 1 + 1 + 2 tokens, the second with padding; the shortest sequences come first."""
    segments = recorded_segments(monkeypatch)
    mask = torch.tensor([[True] * 5, [True] * 4 + [False]])
    starts = torch.tensor([[True, False, True, False, False], [True, True, True, False, True]])
    packed = pack_rows(mask, starts=starts)
    assert [segment.length for segment in segments] == [1, 1, 2, 2, 3]
    assert packed.tokens.tolist() == [5, 6, 0, 1, 7, 8, 2, 3, 4]
    assert packed.position_ids.tolist() == [[0, 0, 0, 1, 0, 1, 0, 1, 2]]
    assert packed.source.tolist() == [2, 3, 6, 7, 8, 0, 1, 4, 5, 0]


def test_a_prompt_ends_before_the_first_token_of_the_loss():
    """Left padding of 2 and 3 prompt tokens; right padding; a loss from the first token on; no loss at all."""
    attention = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]]).bool()
    loss = torch.tensor([[0, 0, 0, 0, 0, 1], [0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    assert prompt_lengths_of(loss, attention).tolist() == [3, 1, 0, 0]


def test_equal_prompts_are_shared_and_longer_shorter_or_unknown_ones_are_not():
    """Rows 0 and 3 begin with 1 2 3; row 1's prompt is 1 2; row 2 begins the same, but its prompt is unknown."""
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [9, 1, 2, 3], [1, 2, 7, 7]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[3, 0] = False
    assert shared_prompts(ids, mask, torch.tensor([3, 2, 0, 3, 3])) == [([0, 3], 3)]
    assert shared_prompts(ids, mask, torch.zeros(5, dtype=torch.long)) == []
