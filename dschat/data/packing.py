"""Sequence packing: several conversations in one row, so that no compute is spent on padding.

Which conversations share a row is decided once, before training; rows are then shuffled like any others. A packed row
stores the lengths of its conversations, and position ids restart with each (collate_sft), by which attention separates
them (models.packed). Losses are sums over trained tokens of the whole step, so packing does not change them.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from datasets import Sequence as ListOf
from datasets.arrow_writer import ArrowWriter

from dschat.checkpoints.verified_folder import written_folder
from dschat.distributed import watchdog

from .arrow import is_prepared
from .encoding import FEATURES

WINDOW = 1024  # conversations packed together: enough to fill rows nearly completely, few enough for memory
PACKED_FEATURES = Features({**FEATURES["sft"], "conversation_lengths": ListOf(Value("int32"))})


def pack(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Pack items into rows of `capacity` tokens by best-fit decreasing.

    Returns: the items of each row, longest first; every item is in one row.

    Source: Johnson 1974, "Fast algorithms for bin packing": at most 11/9 of the optimum, plus a constant.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        index = bisect.bisect_left(free, (lengths[item], -1))  # the fullest row with enough room
        left, row = free.pop(index) if index < len(free) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(item)
        bisect.insort(free, (left - lengths[item], row))
    return rows


def packed(
    conversations: Dataset, *, capacity: int, seed: int, identity: Any, folder: str, verify: bool = True
) -> Dataset:
    """The conversations ("sft" rows) packed into rows of up to `capacity` tokens, cached in a folder inside `folder`.

    Args:
        seed: for the order in which windows of conversations are drawn.
        identity: fingerprint of the conversations; another one creates another folder.
        verify: False where another process of this machine has just verified it.
    """
    settings = json.dumps([identity, capacity, seed, WINDOW, len(conversations)])
    path = Path(folder) / f"packed-{hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()}"
    if not is_prepared(path, verify=verify):
        with written_folder(path) as unfinished:
            _write(unfinished / "rows.arrow", conversations, capacity, seed)
    return Dataset.from_file(str(path / "rows.arrow"))


def _write(file: Path, conversations: Dataset, capacity: int, seed: int) -> None:
    order = np.random.default_rng([seed, len(conversations)]).permutation(len(conversations))
    with ArrowWriter(features=PACKED_FEATURES, path=str(file), writer_batch_size=100) as writer:
        for start in range(0, len(order), WINDOW):
            window = conversations[order[start : start + WINDOW].tolist()]  # column → values
            watchdog.progress()
            for items in pack(window["length"], capacity=capacity):
                lengths = [window["length"][item] for item in items]
                joined = {
                    name: [x for item in items for x in window[name][item]] for name in ("input_ids", "loss_mask")
                }
                writer.write({**joined, "length": sum(lengths), "conversation_lengths": lengths})
        writer.finalize()
