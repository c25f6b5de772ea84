"""The reward of the training benchmark's RL cases, the same for all contenders: cheap, and different for most texts."""

from __future__ import annotations

from collections.abc import Sequence


def token_score(token_ids: Sequence[Sequence[int]]) -> list[float]:
    """Mean over a response of its token ids modulo 7, as a share of 6."""
    return [sum(token % 7 for token in response) / (6 * max(1, len(response))) for response in token_ids]
