"""Output folders of runs for the report, and the data that its page embeds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

LINES = [
    {"step": 1, "time": 2.0, "phase": "train", "loss": 3.0, "note": "text", "flag": True},
    {"step": 2, "time": 4.0, "phase": "train", "loss": 2.0, "kl": None},
    {"step": 2, "time": 4.5, "phase": "eval", "eval_loss": 2.5, "judge": 0.75},
]


def write_run(folder: Path, *, name: str = "step3_rlhf_finetuning", metrics: list[dict] | None = None,
              samples: list[dict] | None = None, arguments: dict | None = None) -> Path:  # fmt: skip
    """Write run.json, metrics.jsonl and samples.jsonl; returns the folder."""
    folder.mkdir(parents=True)
    arguments = {"kl_coef": 0.1, "data_path": ["a", "b"]} if arguments is None else arguments
    (folder / "run.json").write_text(json.dumps({"name": name, "arguments": arguments}))
    for file, rows in (("metrics.jsonl", LINES if metrics is None else metrics), ("samples.jsonl", samples or [])):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def sample(step: float, prompt: str, response: str, *, phase: str = "eval", score: float | None = 0.5,
           **others: Any) -> dict[str, Any]:  # fmt: skip
    return {"step": step, "phase": phase, "prompt": prompt, "response": response, "score": score} | others


def embedded(page: str) -> dict[str, Any]:
    """The JSON in a page of the report."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
