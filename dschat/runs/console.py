"""Progress of a run on the console: a live line on a terminal, one short line per interval in a file or pipe."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from datetime import timedelta

from tqdm import tqdm

from dschat.arguments.secrets import redacted
from dschat.distributed.terminal import printable

# The first four of these that a step has, and its tokens per second, are shown; metrics.jsonl has all metrics.
MAIN_METRICS = (
    "score", "judge", "kl", "response_length", "entropy", "loss", "accuracy", "rewards/accuracies", "rewards/margins",
    "logps/chosen", "margin", "token_accuracy", "grad_norm", "learning_rate",
)  # fmt: skip
RATE = "tokens_per_second"
BAR = "{desc} {n_fmt}/{total_fmt} |{bar:10}| {rate_fmt} ETA {remaining}{postfix}"


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
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            self._bar = tqdm(
                desc=name, total=total_steps, initial=first_step, unit="step", bar_format=BAR, dynamic_ncols=True,
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
            self._bar.set_postfix_str(_numbers(main_metrics(values)), refresh=False)
            self._bar.update(step - self._bar.n)
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
        width = shutil.get_terminal_size().columns
        lines = (
            textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
            for line in text.splitlines()
        )
        tqdm.write("\n".join(lines), file=sys.stdout)

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


def _numbers(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
