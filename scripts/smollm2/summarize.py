"""Summarizes the results of the three steps from their metrics: printed, and written to summary.json."""

import argparse
import json
from pathlib import Path

from dschat.arguments.script_inputs import existing_folder, exit_on_mistake, read_json_lines

# Step → its metrics on held-out rows, reported before the first and after the last update.
FIGURES = {
    "sft": ("perplexity",),
    "reward": ("accuracy", "eval_loss"),
    "ppo": ("score", "kl", "reward", "response_length", "ended_by_eos", "entropy"),
}


def summarize(output: Path) -> dict[str, dict]:
    """Step → {figure: [before, after], "seconds": float}.

    Raises:
        ValueError: a step has no evaluation before and after training, or its metrics cannot be read.
    """
    summary: dict[str, dict] = {}
    for step, figures in FIGURES.items():
        path = output / step / "metrics.jsonl"
        lines = read_json_lines(path, fields=["phase", "time"]) if path.exists() else []
        evaluations = [line for line in lines if line["phase"] == "eval"]
        if len(evaluations) < 2:
            raise ValueError(f"{path}: {len(evaluations)} evaluations, two are needed; finish scripts/smollm2.sh first")
        for name in figures:
            if not all(isinstance(line.get(name), float | int) for line in (evaluations[0], evaluations[-1])):
                raise ValueError(f"{path}: an evaluation has no number for {name}; run scripts/smollm2.sh again")
        summary[step] = {name: [evaluations[0][name], evaluations[-1][name]] for name in figures}
        summary[step]["seconds"] = lines[-1]["time"]
    return summary


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=existing_folder, help="the --output of scripts/smollm2.sh")
    output = parser.parse_args(arguments).output
    with exit_on_mistake("summarize"):
        summary = summarize(output)
        (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(f"{'held out':28}{'before':>10}{'after':>10}")
    for step, figures in summary.items():
        for name, values in figures.items():
            if name != "seconds":
                print(f"{step + ' ' + name:28}{values[0]:10.3f}{values[1]:10.3f}")


if __name__ == "__main__":
    main()
