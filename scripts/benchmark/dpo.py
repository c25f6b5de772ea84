"""DPO on the quickstart's pairs with several strengths of the constraint and learning rates, judged by its gold reward.

    python scripts/benchmark/dpo.py output/quickstart --json results.jsonl

The folder is that of `bash scripts/quickstart.sh`: its SFT model, pairs and held-out prompts are used. Gold reward and
accuracy are those of scripts/quickstart/summarize.py, sampled at temperature 1 and greedy, and the metrics of held-out
pairs those of the last evaluation. A row of the JSON file has the settings and these figures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from algorithms import evaluate, run

from dschat.arguments.script_inputs import existing_folder, read_json_lines

# Those of a run besides the shared ones; the first is that of scripts/quickstart.sh --dpo.
SETTINGS = [
    {"beta": 0.3, "sft_coef": 1.0, "learning_rate": 5e-4},
    {"beta": 1.0, "sft_coef": 0.0, "learning_rate": 5e-4},
    {"beta": 0.3, "sft_coef": 0.0, "learning_rate": 5e-4},
    {"beta": 0.1, "sft_coef": 0.0, "learning_rate": 1e-4},
    {"beta": 0.1, "sft_coef": 0.0, "learning_rate": 3e-4},
    {"beta": 0.1, "sft_coef": 0.0, "learning_rate": 1e-3},
]


def train(settings: dict[str, float], quickstart: Path, output: Path, seed: int) -> float:
    """Run DPO; returns its seconds."""
    return run("training/step2_dpo_finetuning/main.py", {
        "model_name_or_path": quickstart / "sft", "data_path": quickstart / "pairs" / "preferences.jsonl",
        "output_dir": output, "seed": seed, "dtype": "fp32", "zero_stage": 0, "max_seq_len": 80,
        "per_device_train_batch_size": 64, "per_device_eval_batch_size": 64, "eval_fraction": 0.1,
        "num_warmup_steps": 10, **settings,
    }, output.parent / f"{output.name}.log")  # fmt: skip


def row_of(settings: dict[str, float], model: Path, prompts: list[dict], seed: int) -> dict[str, Any]:
    """Settings, gold reward and accuracy on the prompts, and the metrics of the held-out pairs where there are any."""
    figures, _ = evaluate(model, prompts, samples=4, seed=seed)
    log = read_json_lines(model / "metrics.jsonl", fields=["phase"])
    last = [row for row in log if row["phase"] == "eval"][-1]
    names = {"pair_accuracy": "rewards/accuracies", "pair_chosen_logprob": "logps/chosen"}
    pairs = {name: round(last[metric], 4) for name, metric in names.items() if metric in last}
    return {**settings, "seed": seed, **{name: round(value, 4) for name, value in figures.items()}, **pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quickstart", type=existing_folder, help="output folder of the quickstart")
    parser.add_argument("--output", type=Path, default=Path("output/dpo"), help="folder of the runs")
    parser.add_argument("--json", type=Path, help="file of the rows, one JSON object a line")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    quickstart = options.quickstart.resolve()
    prompts = read_json_lines(quickstart / "data" / "prompts_eval.jsonl")
    rows = [row_of({}, quickstart / "sft", prompts, options.seed)]
    for settings in SETTINGS:
        output = options.output.resolve() / "-".join(f"{name}-{value:g}" for name, value in settings.items())
        seconds = train(settings, quickstart, output, options.seed)
        rows.append(row_of(settings, output, prompts, options.seed) | {"seconds": round(seconds, 1)})
        print(json.dumps(rows[-1]), flush=True)
        if options.json:
            options.json.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
