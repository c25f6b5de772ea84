"""Keep the best model so far, by an evaluation metric, as a Hugging Face folder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dschat.arguments import RunArguments
from dschat.checkpoints.leftovers import restore_replaced
from dschat.distributed import collectives, failpoint
from dschat.models.weights import ExportError
from dschat.runs.model_card import FILE, is_foreign, write_model_card
from dschat.runs.run_log import RunLog

NO_ROWS = "none, since there are no held-out rows: set --eval_fraction or --eval_data_path"


def check_evaluation_rows(run: RunArguments, rows: int) -> None:
    """Raise ValueError if --best_metric is given but there are no evaluation rows."""
    if run.best_metric is not None and not rows:
        raise ValueError(f"--best_metric {run.best_metric}: the evaluation has no such metric; it has {NO_ROWS}")


class BestModel:
    """Maintains OUTPUT_DIR/best: the model at its best evaluation, and best.json with step, metric and value.

    Args:
        run: provides --best_metric, --best_mode and the output folder.
        log: every new best model is logged here.
        state: loaded from a checkpoint, or None; ignored if it belongs to another metric or mode.

    Attributes:
        needs_evaluation: there is no evaluation to compare with yet, so one is due before the first step; it also
            validates the name of the metric.
    """

    def __init__(self, run: RunArguments, log: RunLog, state: Mapping[str, Any] | None) -> None:
        self.run, self.log = run, log
        resumed = state is not None and (run.best_metric, run.best_mode) == (
            # States of older versions lack metric and mode.
            state.get("metric", run.best_metric if state["value"] is not None else None),
            state.get("mode", run.best_mode),
        )
        self.step, self.value = (state["step"], state["value"]) if resumed else (None, None)
        self.needs_evaluation = run.best_metric is not None and not resumed

    @property
    def state(self) -> dict[str, Any]:
        """JSON state for a checkpoint."""
        return {"step": self.step, "value": self.value, "metric": self.run.best_metric, "mode": self.run.best_mode}

    def update_best(self, step: int, metrics: Mapping[str, float], export: Callable[[Path], None]) -> None:
        """Export the model if this evaluation is the best so far; a collective.

        Args:
            metrics: metrics of an evaluation, the same on all ranks.
            export: writes the model into a folder, on all ranks.

        Raises:
            ValueError: the metrics lack --best_metric.
        """
        name = self.run.best_metric
        if name is None:
            return
        if name not in metrics:
            raise ValueError(
                f"--best_metric {name}: the evaluation has no such metric; it has "
                + (", ".join(sorted(metrics)) or NO_ROWS)
            )
        value = metrics[name]
        better = self.value is None or (value > self.value if self.run.best_mode == "max" else value < self.value)
        if not (math.isfinite(value) and better):
            return
        folder = Path(self.run.output_dir, "best")
        try:
            self._export_and_swap(folder, {"step": step, name: value}, export)
        except ExportError as error:
            self.log.info(f"warning: {error}. The previous best model is kept, and the run continues")
            return
        self.step, self.value = step, value
        self.log.info(f"best so far: {name} {value:.4g} at step {step}, kept in {folder}")

    def _export_and_swap(self, folder: Path, description: dict[str, Any], export: Callable[[Path], None]) -> None:
        """Export to a temporary folder, swap it with the previous best model, then delete that.

        Raises: ExportError on every rank.
        """
        unfinished, replaced = (folder.with_name(f"{folder.name}.{suffix}") for suffix in ("unfinished", "replaced"))
        problem = None
        try:
            export(unfinished)
            if collectives.is_main():
                try:
                    (unfinished / "best.json").write_text(json.dumps(description), encoding="utf-8")
                    if (folder / FILE).is_file() and is_foreign(folder / FILE):
                        shutil.copy2(folder / FILE, unfinished / FILE)
                    else:
                        write_model_card(unfinished, run_folder=self.run.output_dir, name="best")
                    shutil.rmtree(replaced, ignore_errors=True)
                    if folder.exists():
                        folder.rename(replaced)
                    failpoint.reached("best_replacing")  # if killed here, the next start restores the old folder
                    unfinished.rename(folder)
                except OSError as error:
                    problem = f"the best model could not be kept in {folder}: {error}"
            problem = collectives.all_gather_objects(problem)[0]
            if problem:
                raise ExportError(problem)
        finally:
            if collectives.is_main():
                restore_replaced(folder, replaced)
                for temporary in (unfinished, replaced):
                    shutil.rmtree(temporary, ignore_errors=True)
