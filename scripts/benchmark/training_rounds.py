"""Interleaved turns of the training contenders on one case; a failure is recorded as a result."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from contender import one_line
from rounds import progress
from training_process import TrainingProcess, TrainingTurn


@dataclass
class TrainingResult:
    """Turns of one contender on one case, without its warm-up turn."""

    contender: str
    turns: list[TrainingTurn] = field(default_factory=list)
    note: str = ""
    failure: str = ""

    @contextlib.contextmanager
    def or_failure(self):
        """Record an exception as the contender's failure."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or one_line(error)
            progress(f"{self.contender}: {self.failure}")

    def median(self, value: Callable[[TrainingTurn], float]) -> float | None:
        """Median over the turns; None if it failed."""
        return statistics.median(map(value, self.turns)) if self.turns and not self.failure else None

    @property
    def peak_bytes(self) -> int | None:
        return max((turn.peak_bytes for turn in self.turns), default=None) if not self.failure else None


def measure_training(
    contenders: dict[str, Callable[[], TrainingProcess]], *, turns: int, tokens: int | None
) -> list[TrainingResult]:
    """Start every contender and run a warm-up turn, then run them in alternating turns, one at a time.

    Args:
        contenders: name → starts its process.
        turns: of each contender after the warm-up.
        tokens: real tokens that every turn must have; None: they are sampled.
    """
    results = {name: TrainingResult(name) for name in contenders}
    processes: dict[str, TrainingProcess] = {}
    with contextlib.ExitStack() as stack:
        for name, start in contenders.items():
            progress(f"{name}: starting")
            with results[name].or_failure():
                process = start()
                stack.callback(process.close)
                results[name].note = process.note
                checked(process.turn(), tokens)
                processes[name] = process
        for number in range(turns):
            # Alternating order, so that drift of the machine's speed affects all contenders equally.
            for name in list(processes)[:: -1 if number % 2 else 1]:
                if not results[name].failure:
                    progress(f"{name}: turn {number + 1} of {turns}")
                    with results[name].or_failure():
                        results[name].turns.append(checked(processes[name].turn(), tokens))
    return list(results.values())


def checked(turn: TrainingTurn, tokens: int | None) -> TrainingTurn:
    """The turn. Raises RuntimeError if it trained on a wrong number of tokens."""
    if tokens is not None and turn.tokens != tokens:
        raise RuntimeError(f"trained on {turn.tokens} tokens instead of {tokens}")
    return turn
