"""Experiment trackers of --report_to, through accelerate.tracking: TensorBoard, Weights & Biases, MLflow and others.

Only the main rank creates them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import tracking

# Accelerate's logger, and its check of the rank (main_process_only below), need its own process state, which would
# change the number of threads.
tracking.logger = logging.getLogger(tracking.__name__)
PROJECT = "dschat"
RUN_NAME = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name"}  # their argument
SAMPLES = 8  # texts of a step


class Tracker:
    """One tracker, started.

    Args:
        name: as in --report_to.
        folder: of TensorBoard's event files; for others the run's, where those that keep files make a subfolder.
        run_name: shown by trackers that name runs.
        arguments: flag → value, the hyper-parameters of the run.
        purge_step: TensorBoard hides earlier entries from this step on; None: nothing is resumed.
    """

    def __init__(
        self, name: str, *, folder: Path, run_name: str, arguments: Mapping[str, Any], purge_step: int | None = None
    ) -> None:
        kind = tracking.LOGGER_TYPE_TO_CLASS[name]
        options: dict[str, Any] = {RUN_NAME[name]: run_name} if name in RUN_NAME else {}
        if name == "tensorboard":
            options = {"logging_dir": folder, "purge_step": purge_step}
        elif kind.requires_logging_directory:
            options["logging_dir"] = folder
        elif name == "wandb":
            options["dir"] = folder
        self.name = name
        self.tracker: tracking.GeneralTracker = kind("" if name == "tensorboard" else PROJECT, **options)
        self.tracker.main_process_only = False
        self.tracker.start()
        self.tracker.store_init_configuration({flag: _plain(value) for flag, value in arguments.items()})

    def metrics(self, step: int, values: Mapping[str, float], *, phase: str) -> None:
        self.tracker.log({f"{phase}/{name}": float(value) for name, value in values.items()}, step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]], *, phase: str) -> None:
        """Log the first rollouts of a step, where the tracker shows texts or tables."""
        rows = rows[:SAMPLES]
        if self.name == "tensorboard":
            texts = (_markdown(row) for row in rows)
            self.tracker.log({f"{phase}/samples": "\n\n---\n\n".join(texts)}, step=step)
        elif hasattr(self.tracker, "log_table"):  # wandb and clearml have it
            table = [[str(row.get(column, "")) for column in ("prompt", "response", "score")] for row in rows]
            self.tracker.log_table(f"{phase}/samples", columns=["prompt", "response", "score"], data=table, step=step)

    def close(self) -> None:
        self.tracker.finish()


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _markdown(row: Mapping[str, Any]) -> str:
    """A sample as indented blocks, in which TensorBoard interprets neither Markdown nor HTML."""
    prompt, response = (
        "\n".join(f"    {line}" for line in str(row.get(part, "")).splitlines()) for part in ("prompt", "response")
    )
    return f"**prompt**\n\n{prompt}\n\n**response, score {row.get('score')}**\n\n{response}"
