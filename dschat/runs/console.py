"""Progress of a run on the console: a live line on a terminal, one short line per interval in a file or pipe."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from datetime import timedelta

from tqdm import tqdm

from dschat.arguments.secrets import redacted
from dschat.distributed.terminal import fitted, is_terminal, printable

# The first four of these that a step has, and its tokens per second, are shown; metrics.jsonl has all metrics.
MAIN_METRICS = (
    "score", "judge", "kl", "response_length", "entropy", "loss", "accuracy", "rewards/accuracies", "rewards/margins",
    "logps/chosen", "margin", "token_accuracy", "grad_norm", "learning_rate",
)  # fmt: skip
RATE = "tokens_per_second"
# On the live line, where space is scarce.
SHORT = {
    "response_length": "len", "entropy": "ent", "token_accuracy": "acc", "accuracy": "acc", "rewards/accuracies": "acc",
    "rewards/margins": "margin", "logps/chosen": "logp", "grad_norm": "grad", "learning_rate": "lr", RATE: "tok/s",
}  # fmt: skip
BAR, WIDE = "{desc} {n_fmt}/{total_fmt} {rate_fmt} ETA {remaining}", 120  # columns from which on there is a bar
WIDE_BAR = "{desc} {n_fmt}/{total_fmt} |{bar:10}| {rate_fmt} ETA {remaining}"


class Console:
    """Prints to standard output.

    Args:
        name: of the step, in front of lines.
        total_steps, first_step: of the run; a resumed run starts at first_step.
        logging_steps: without a terminal, training metrics are printed every so many steps, and for the last.
    """

    def __init__(self, name: str, *, total_steps: int, first_step: int = 0, logging_steps: int = 1) -> None:
        self.name, self.total_steps, self.first_step, self.logging_steps = name, total_steps, first_step, logging_steps
        self._bar: tqdm | None = None
        if is_terminal() and os.environ.get("TERM") != "dumb":
            self._bar = tqdm(
                desc=name.partition("_")[0], total=total_steps, initial=first_step, bar_format=BAR, dynamic_ncols=True,
                file=sys.stdout, smoothing=0.1,
            )  # fmt: skip

    def metrics(self, step: int, values: Mapping[str, float], *, phase: str, seconds: float) -> None:
        """Show the metrics of a finished step: all of an evaluation, the main ones of training.

        Args:
            seconds: since this process started the run.
        """
        if phase != "train":
            self.print(f"{phase} {step}/{self.total_steps}  {_numbers(values)}")
        elif self._bar is not None:
            self._bar.update(step - self._bar.n)
            columns = shutil.get_terminal_size().columns
            progress = WIDE_BAR if columns >= WIDE else BAR
            self._bar.bar_format = progress
            metrics = live_metrics(values, width=columns - len(str(self._bar)) - 2)
            self._bar.bar_format = f"{progress} {metrics}"
            self._bar.refresh()
        elif step % self.logging_steps == 0 or step in (self.first_step + 1, self.total_steps):
            line = f"{phase} {step}/{self.total_steps}  {_numbers(main_metrics(values))}"
            self.print(line + self._remaining(step, seconds))

    def print(self, text: str) -> None:
        """Print a line, on a terminal above the live line and wrapped to its width."""
        text = printable(redacted(f"[{self.name}] {text}"))
        if self._bar is None:
            print(text, flush=True)
            return
        tqdm.write(fitted(text), file=sys.stdout)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _remaining(self, step: int, seconds: float) -> str:
        done = step - self.first_step
        if not done > 0 or step >= self.total_steps:
            return ""
        return f"  ETA {timedelta(seconds=round(seconds / done * (self.total_steps - step)))}"


def main_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """At most five metrics to watch; all of them if none is a usual one."""
    names = [name for name in MAIN_METRICS if name in values][:4] + [RATE] * (RATE in values)
    return {name: values[name] for name in names or list(values)[:5]}


def live_metrics(values: Mapping[str, float], *, width: int) -> str:
    """The main metrics with short names, as many as fit into this number of characters."""
    line = ""
    for name, value in main_metrics(values).items():
        number = f"{value:,.0f}" if 1000 <= value < 1e9 else f"{value:.3g}"
        longer = f"{line} {SHORT.get(name, name)} {number}".lstrip()
        line = longer if len(longer) <= width else line
    return line


def _numbers(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
