"""Prompts with the responses of other rows, of which KTO's reference point is estimated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow
from datasets import concatenate_datasets

from .datasets import DataSplits


def with_mismatched(splits: DataSplits, *, max_tokens: int) -> DataSplits:
    """Unpaired rows with a column `mismatched_ids`: a row's prompt, then the response of the next row with another one.

    Which row that is depends on the rows alone, not on how a step is cut, so the reference can score it beforehand. The
    next row of the last training row is the first held-out one, and round again. The column is held in memory, 4 bytes
    a token.

    Args:
        splits: of kind "unpaired".
        max_tokens: the response is cut where both together are longer.

    Raises:
        ValueError: all rows have one prompt.
    """
    rows = concatenate_datasets([splits.train, splits.eval])
    table = rows.with_format("arrow")[:]
    column = table["input_ids"].combine_chunks()
    ids, starts = column.values.to_numpy(), column.offsets.to_numpy()
    borders = starts[:-1] + table["prompt_length"].to_numpy()
    prompts = [ids[start:border].tobytes() for start, border in zip(starts, borders, strict=False)]
    joined = [
        np.concatenate([ids[starts[i] : borders[i]], ids[borders[j] : starts[j + 1]]])[:max_tokens]
        for i, j in enumerate(next_other(prompts))
    ]
    offsets = np.cumsum([0, *map(len, joined)], dtype=np.int32)
    rows = rows.add_column("mismatched_ids", pyarrow.ListArray.from_arrays(offsets, np.concatenate(joined)))
    train = len(splits.train)
    held_out = rows.select(range(train, len(rows))) if len(splits.eval) else splits.eval
    return replace(splits, train=rows.select(range(train)), eval=held_out)


def next_other(values: list[bytes]) -> list[int]:
    """For each place the next one, round and round, with another value. Raises ValueError where there is none."""
    count = len(values)
    if len(set(values)) < 2:
        raise ValueError(
            "--preference_loss kto estimates a KL from responses to other prompts, but all rows have one prompt: bring "
            "rows of several prompts."
        )
    found = [0] * (2 * count)  # twice round, so that the search from the end meets the beginning
    for place in range(2 * count - 2, -1, -1):
        after = (place + 1) % count
        found[place] = after if values[after] != values[place % count] else found[place + 1]
    return found[:count]
