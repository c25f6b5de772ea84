"""Batch sampling: the rows of each optimizer step, and each rank's share of them.

The rows of a step depend on (seed, epoch) alone: world size and micro-batch size only decide how a step is split, so
the same run on another number of devices trains on the same global batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WINDOW = 50  # global batches sorted by length together: little padding, and still well shuffled


class GlobalBatches:
    """Row indices of every optimizer step of an epoch.

    Args:
        lengths: tokens of each row; only their ranking matters.
        global_batch_size: rows per optimizer step, over all ranks.
        shuffle: a new order for every epoch; otherwise the rows' own order.
        group_by_length: put rows of similar length into one step (within windows of 50 steps).
        drop_last: skip the rows that do not fill a step (different ones each epoch, if shuffled); otherwise
            they form a smaller last step.

    Raises:
        ValueError: no rows, or fewer than one global batch although drop_last.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        global_batch_size: int,
        seed: int,
        shuffle: bool = True,
        group_by_length: bool = True,
        drop_last: bool = True,
    ) -> None:
        rows = len(lengths)
        if global_batch_size < 1:
            raise ValueError(f"The global batch size is {global_batch_size}: it must be at least 1.")
        if rows == 0 or (drop_last and rows < global_batch_size):
            raise ValueError(
                f"The data has {rows} rows, but one step needs {global_batch_size} (per-device batch × accumulation "
                "steps × ranks): lower --per_device_train_batch_size (step 3: --per_device_generation_batch_size) or "
                "--gradient_accumulation_steps, use fewer processes, or add data."
            )
        self.lengths = np.asarray(lengths[:], dtype=np.int64)  # [:] reads an Arrow column at once
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.group_by_length = group_by_length
        self.dropped_per_epoch = rows % global_batch_size if drop_last else 0
        self._cached_epoch: tuple[int, list[list[int]]] = (-1, [])

    def __len__(self) -> int:
        """Optimizer steps per epoch."""
        return -(-(len(self.lengths) - self.dropped_per_epoch) // self.global_batch_size)

    def step(self, step: int) -> list[int]:
        """Row indices of an optimizer step, counted from 0 over the full_rows run."""
        epoch, position = divmod(step, len(self))
        if self._cached_epoch[0] != epoch:
            self._cached_epoch = (epoch, self.epoch(epoch))
        return self._cached_epoch[1][position]

    def epoch(self, epoch: int) -> list[list[int]]:
        """The steps of this epoch, each a list of row indices, longest row first where grouped by length."""
        size = self.global_batch_size
        generator = np.random.default_rng([self.seed, epoch])
        rows = len(self.lengths)
        order = generator.permutation(rows) if self.shuffle else np.arange(rows)
        full_rows = rows - rows % size
        full, remainder = order[:full_rows], order[full_rows:]
        if self.group_by_length:
            full = np.concatenate(
                [self._longest_first(full[i : i + WINDOW * size]) for i in range(0, full_rows, WINDOW * size)] or [full]
            )
            remainder = self._longest_first(remainder)
        steps = full.reshape(-1, size)
        if self.shuffle:
            steps = steps[generator.permutation(len(steps))]
        batches = steps.tolist()
        if len(remainder) and not self.dropped_per_epoch:
            batches.append(remainder.tolist())
        return batches

    def _longest_first(self, rows: np.ndarray) -> np.ndarray:
        return rows[np.argsort(-self.lengths[rows], kind="stable")]


def rank_share(indices: Sequence[int], *, rank: int, world_size: int, micro_batch_size: int) -> list[list[int]]:
    """The micro-batches of one rank out of the rows of one step.

    Rows are assigned round-robin, so every rank gets short and long ones. Every rank gets the same number of
    micro-batches, the last ones possibly empty: all ranks must run the same number of forward passes, or the
    collectives inside them hang. The collators turn an empty list into one fully masked row.

    Raises:
        ValueError: rank outside [0, world_size), or micro_batch_size < 1.
    """
    if not 0 <= rank < world_size or micro_batch_size < 1:
        raise ValueError(
            f"rank {rank} of {world_size}, micro_batch_size {micro_batch_size}: rank must be in [0, {world_size}), "
            "micro_batch_size at least 1."
        )
    own_rows = list(indices[rank::world_size])
    largest_share = -(-len(indices) // world_size)
    return [own_rows[i : i + micro_batch_size] for i in range(0, largest_share, micro_batch_size)]
