"""Mismatched prompt-response pairs, from which KTO's reference point is estimated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow
from datasets import concatenate_datasets

from .datasets import DataSplits

FORWARD_TOKENS = "forward_tokens"  # column with the tokens of a row in its longest forward pass, if not its length


def with_mismatched(splits: DataSplits, *, max_tokens: int) -> DataSplits:
    """Add a column `mismatched_ids`: a row's prompt and the response of the next row with another prompt.

    The pairing depends on the rows alone, not on the batches, so reference log-probs can be precomputed. The rows wrap
    around: the last training row is followed by the first held-out one. The column is held in memory, 4 bytes a token.
    Also a column `forward_tokens`: the longer of the two sequences.

    Args:
        splits: of kind "unpaired".
        max_tokens: the response is truncated where both together are longer.

    Raises:
        ValueError: all rows have the same prompt.
    """
    rows = concatenate_datasets([splits.train, splits.eval])
    table = rows.with_format("arrow")[:]
    column = table["input_ids"].combine_chunks()
    ids, starts = column.values.to_numpy(), column.offsets.to_numpy()
    response_starts = starts[:-1] + table["prompt_length"].to_numpy()
    prompts = [ids[start:stop].tobytes() for start, stop in zip(starts, response_starts, strict=False)]
    joined = [
        np.concatenate([ids[starts[i] : response_starts[i]], ids[response_starts[j] : starts[j + 1]]])[:max_tokens]
        for i, j in enumerate(next_different(prompts))
    ]
    offsets = np.cumsum([0, *map(len, joined)], dtype=np.int32)
    rows = rows.add_column("mismatched_ids", pyarrow.ListArray.from_arrays(offsets, np.concatenate(joined)))
    rows = rows.add_column(FORWARD_TOKENS, np.maximum(np.diff(starts), np.diff(offsets)))
    train = len(splits.train)
    held_out = rows.select(range(train, len(rows))) if len(splits.eval) else splits.eval
    return replace(splits, train=rows.select(range(train)), eval=held_out)


def next_different(values: list[bytes]) -> list[int]:
    """For each index the next one, cyclically, with a different value. Raises ValueError if all values are equal."""
    count = len(values)
    if len(set(values)) < 2:
        raise ValueError(
            "--preference_loss kto estimates a KL from responses to other prompts, but all rows have the same prompt: "
            "use rows with several prompts."
        )
    next_index = [0] * (2 * count)  # two cycles, so that the scan from the end wraps around
    for index in range(2 * count - 2, -1, -1):
        after = (index + 1) % count
        next_index[index] = after if values[after] != values[index % count] else next_index[index + 1]
    return next_index[:count]
