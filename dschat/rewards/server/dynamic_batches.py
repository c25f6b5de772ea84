"""Dynamic batching: joins the rows of concurrent requests into batches, processed by one worker thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass


class QueueFull(Exception):
    """The queue cannot hold the rows."""


@dataclass(frozen=True, eq=False)
class _Row:
    ids: Sequence[int]
    score: asyncio.Future[float]
    enqueued_at: float  # event loop time


class DynamicBatches:
    """A bounded queue of rows, and the task that processes it batch by batch.

    Args:
        score_batch: token ids of some rows → a score for each; runs in a thread, one call at a time.
        max_rows: maximum rows per batch.
        max_tokens: maximum tokens per batch, padded to its longest row; a longer row is a batch of its own.
        max_wait: seconds that a row waits for others while the worker is idle.
        max_queue: maximum number of waiting rows.
    """

    def __init__(
        self, score_batch: Callable[[list[Sequence[int]]], list[float]], *, max_rows: int, max_tokens: int,
        max_wait: float, max_queue: int,
    ) -> None:  # fmt: skip
        self.score_batch, self.max_rows, self.max_tokens = score_batch, max_rows, max_tokens
        self.max_wait, self.max_queue = max_wait, max_queue
        self.waiting: deque[_Row] = deque()
        self._arrived = asyncio.Event()

    async def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The score of each row. Cancelling the caller removes its waiting rows from the queue.

        Raises:
            QueueFull: the rows do not all fit into the queue; or any exception of `score_batch`.
        """
        if len(self.waiting) + len(rows) > self.max_queue:
            raise QueueFull(f"{len(self.waiting)} rows of at most {self.max_queue} are queued")
        loop = asyncio.get_running_loop()
        new_rows = [_Row(ids, loop.create_future(), loop.time()) for ids in rows]
        self.waiting.extend(new_rows)
        self._arrived.set()
        try:
            return list(await asyncio.gather(*(row.score for row in new_rows)))
        except BaseException:  # the caller was cancelled, or some of its rows failed: drop the others
            for row in new_rows:
                row.score.cancel()
            self.waiting = deque(row for row in self.waiting if not row.score.cancelled())
            raise

    async def run(self) -> None:
        """Process batches until cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="scores") as thread:
            while True:
                batch = await self._next_batch()
                try:
                    scores = await loop.run_in_executor(thread, self.score_batch, [row.ids for row in batch])
                    for row, score in zip(batch, scores, strict=True):
                        if not row.score.done():
                            row.score.set_result(score)
                except Exception as error:  # an exception of `score_batch` fails this batch only
                    for row in batch:
                        if not row.score.done():
                            row.score.set_exception(error)

    async def _next_batch(self) -> list[_Row]:
        """Take at least one row from the front of the queue."""
        loop = asyncio.get_running_loop()
        while True:
            self._arrived.clear()
            remaining = self.waiting[0].enqueued_at + self.max_wait - loop.time() if self.waiting else None
            if len(self.waiting) >= self.max_rows or (remaining is not None and remaining <= 0):
                return self._take_batch()
            try:
                await asyncio.wait_for(self._arrived.wait(), remaining)
            except asyncio.TimeoutError:
                continue

    def _take_batch(self) -> list[_Row]:
        batch: list[_Row] = []
        longest = 0
        while self.waiting and len(batch) < self.max_rows:
            longest = max(longest, len(self.waiting[0].ids))
            if batch and longest * (len(batch) + 1) > self.max_tokens:
                break
            batch.append(self.waiting.popleft())
        return batch
