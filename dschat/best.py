"""The best model so far, by a metric of the evaluations, kept as a Hugging Face folder of its own."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dschat import launch
from dschat.arguments import RunArguments
from dschat.metrics import RunLog


class Best:
    """OUTPUT_DIR/best: the model at its best evaluation, and best.json: step, metric and value.

    Args:
        run: --best_metric, --best_mode and the folder.
        log: is told of a better model.
        state: of a checkpoint, to go on with.
    """

    def __init__(self, run: RunArguments, log: RunLog, state: Mapping[str, Any] | None) -> None:
        self.run, self.log = run, log
        self.step, self.value = (state["step"], state["value"]) if state else (None, None)

    @property
    def state(self) -> dict[str, Any]:
        """JSON of what a resumed run goes on with."""
        return {"step": self.step, "value": self.value}

    def see(self, step: int, metrics: Mapping[str, float], export: Callable[[Path], None]) -> None:
        """Keep the model if the metric of this evaluation is better than all before; a collective.

        Args:
            metrics: of an evaluation, the same on all ranks.
            export: writes the model into a folder, on all ranks.

        Raises:
            ValueError: the evaluation has no such metric.
        """
        name = self.run.best_metric
        if name is None:
            return
        if name not in metrics:
            raise ValueError(
                f"--best_metric {name}: the evaluation has no such metric; it has "
                + (", ".join(sorted(metrics)) or "none: give held-out rows, by --eval_fraction or --eval_data_path")
            )
        value = metrics[name]
        better = self.value is None or (value > self.value if self.run.best_mode == "max" else value < self.value)
        if not (math.isfinite(value) and better):
            return
        self.step, self.value = step, value
        folder, unfinished = Path(self.run.output_dir, "best"), Path(self.run.output_dir, "best.unfinished")
        export(unfinished)
        if launch.is_main():
            (unfinished / "best.json").write_text(json.dumps({"step": step, name: value}), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        launch.barrier()
        self.log.say(f"best so far: {name} {value:.4g} at step {step}, kept in {folder}")
