"""Random segments of packed rows, and attention over them by a dense mask."""

import random

import torch

from dschat.models.packed.layout import Segment

PATTERNS = {  # (query, key) positions in their sequence → attended; None: causal
    "causal": None,
    "window": lambda q, k: (k <= q) & (k > q - 5),
    "long window": lambda q, k: (k <= q) & (k > q - 60),
    "chunks": lambda q, k: (k <= q) & (k // 7 == q // 7),
    "dilated": lambda q, k: (k <= q) & ((q - k) % 3 == 0),
}


def random_segments(trial: random.Random, *, longest: int = 60) -> list[Segment]:
    """Sequences, prompts with continuations, and prompts without any, in the order in which they lie."""
    segments, packed = [], 0
    for length in sorted(trial.randint(1, longest) for _ in range(trial.randint(0, 5))):
        segments.append(Segment(packed, length))
        packed += length
    for _ in range(trial.randint(1, 3)):
        prompt = (packed, trial.randint(1, longest // 2))
        segments.append(Segment(*prompt))
        packed += prompt[1]
        for length in sorted(trial.randint(1, longest) for _ in range(trial.randint(0, 4))):
            segments.append(Segment(packed, length, prompt))
            packed += length
    return segments


def places(segment: Segment) -> list[int]:
    """Where the tokens of a segment's whole sequence lie, by position."""
    return [*range(segment.prefix[0], sum(segment.prefix)), *range(segment.start, segment.start + segment.length)]


def dense_mask(segments: list[Segment], pattern) -> torch.Tensor:
    """[N, N] bool, True where a token attends to another one."""
    size = segments[-1].start + segments[-1].length
    mask = torch.zeros(size, size, dtype=torch.bool)
    for segment in segments:
        tokens, position = torch.tensor(places(segment)), torch.arange(len(places(segment)))
        attended = position[:, None] >= position if pattern is None else pattern(position[:, None], position)
        own = position >= segment.prefix[1]
        mask[tokens[own][:, None], tokens] = attended[own]
    return mask


def dense_attention(q, k, v, mask, *, scale, softcap=None, sinks=None):
    """q [H, N, D]; k, v [G, N, D]; mask [N, N] bool → [H, N, D]."""
    k, v = (tensor.repeat_interleave(len(q) // len(tensor), dim=0) for tensor in (k, v))
    logits = torch.einsum("hqd,hkd->hqk", q, k) * scale
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    weights = torch.where(mask, logits.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return torch.einsum("hqk,hkd->hqd", weights / total, v)
