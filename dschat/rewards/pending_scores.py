"""Scores of reward functions and services, computed by a background thread while the models run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future

from dschat.distributed import watchdog
from dschat.rewards.response_batch import ResponseBatch
from dschat.rewards.retry import RetryPolicy
from dschat.rewards.specification import WeightedSource


class PendingScores:
    """The scores of all sources that are not reward models; one thread calls them one after another.

    A daemon thread, not one of a ThreadPoolExecutor: the run can exit while a function hangs.

    Args:
        sources: by name; reward models are left out.
        batch: the responses to score.
        retry_policy: for functions and services.
    """

    def __init__(
        self, sources: Mapping[str, WeightedSource], batch: ResponseBatch, *, retry_policy: RetryPolicy
    ) -> None:
        self.batch = batch
        self._futures: dict[str, Future[list[float | None]]] = {
            name: Future() for name, source in sources.items() if source.model is None
        }
        self._awaited = threading.Event()
        if self._futures:
            arguments = ({name: sources[name] for name in self._futures}, retry_policy)
            threading.Thread(target=self._run, args=arguments, name="reward-functions", daemon=True).start()

    def scores(self, name: str) -> list[float | None]:
        """The scores of a source, see WeightedSource.scores; waits for them, and raises what the source raised."""
        self._awaited.set()
        try:
            return self._futures[name].result()
        finally:
            self._awaited.clear()

    def _run(self, sources: Mapping[str, WeightedSource], retry_policy: RetryPolicy) -> None:
        with watchdog.progress_only_while(self._awaited):
            for name, source in sources.items():
                try:
                    self._futures[name].set_result(source.scores(self.batch, retry_policy))
                except BaseException as error:  # raised again by `scores`; the sources after it are not called
                    for future in self._futures.values():
                        if not future.done():
                            future.set_exception(error)
                    return
