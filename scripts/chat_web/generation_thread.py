"""One thread that generates all answers: at most one at a time for each model, the others wait in its queue."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

Event = dict[str, Any]
END: Event = {}  # the last event of every job


class QueueFull(Exception):
    """The queue of a model is full."""


@dataclass(frozen=True, eq=False)
class Job:
    """An answer that is generated or waits.

    Attributes:
        steps: called in the generation thread when the job begins; each event that it yields is one step.
        stopped: set to end the job before its next step; `steps` reads it.
        events: those of `steps`, then END.
    """

    steps: Callable[[threading.Event], Iterator[Event]]
    stopped: threading.Event = field(default_factory=threading.Event)
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)


class GenerationThread:
    """Runs the jobs of several models in turns, step by step, in one thread.

    With a thread for each model one would use the device while the other records a step as CUDA graph, which CUDA does
    not allow. Use it as a context manager.

    Args:
        max_waiting: jobs that wait for one model.
    """

    def __init__(self, models: int, *, max_waiting: int = 16) -> None:
        self.max_waiting = max_waiting
        self._waiting: list[deque[Job]] = [deque() for _ in range(models)]
        self._running: list[tuple[Job, Iterator[Event]] | None] = [None] * models
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def __enter__(self) -> GenerationThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all jobs and wait for the step that is running."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def submit(self, model: int, job: Job) -> int:
        """Queue a job; returns how many of the same model are before it.

        Raises: QueueFull if too many wait, or the thread ends.
        """
        with self._changed:
            before = len(self._waiting[model]) + (self._running[model] is not None)
            if before > self.max_waiting:
                raise QueueFull(f"{before} answers of this model are not complete: wait for some, or stop them")
            if self._closed:
                raise QueueFull("chat.py is ending")
            self._waiting[model].append(job)
            self._changed.notify()
        return before

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(self._waiting) or any(self._running))
                if self._closed:
                    break
                for model, waiting in enumerate(self._waiting):
                    if self._running[model] is None and waiting:
                        job = waiting.popleft()
                        self._running[model] = (job, job.steps(job.stopped))
            for model, running in enumerate(self._running):
                if running is not None and not self._step(*running):
                    self._running[model] = None
        self._cancel_all()

    def _step(self, job: Job, steps: Iterator[Event]) -> bool:
        """Run one step; False if the job has ended."""
        try:
            event = next(steps, END)
        except ValueError as error:  # a setting that the model does not allow
            job.events.put({"error": str(error)})
            event = END
        except Exception as error:  # of model or device, such as out of memory: the next answer may succeed
            logger.exception("an answer could not be generated")
            job.events.put({"error": f"generation failed ({type(error).__name__}: {error})"})
            event = END
        job.events.put(event)
        return event is not END

    def _cancel_all(self) -> None:
        jobs = [running[0] for running in self._running if running] + [job for row in self._waiting for job in row]
        self._running = [None] * len(self._running)
        for job in jobs:
            job.events.put({"error": "chat.py has ended"})
            job.events.put(END)
