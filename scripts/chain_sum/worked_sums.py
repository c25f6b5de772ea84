"""SFT data for chain sums: reasoning-gym's questions, answered with one intermediate step per line.

    python scripts/chain_sum/worked_sums.py --output DIR --seed 1 --rows 1200 --min_terms 2 --max_terms 3

writes `sft.jsonl`: prompt (reasoning-gym's question) and response, "4 + 3 = 7\\n7 - 9 = -2". The last number is the
answer. reasoning-gym provides answers without intermediate steps, so these are generated here.
"""

from __future__ import annotations

import argparse
import json
import re

import reasoning_gym

from dschat.arguments.script_inputs import SEEDS, exit_on_mistake, new_folder, number_type


def worked_solution(expression: str) -> str:
    """The steps of a chain of additions and subtractions, one per line: "4 + 3 = 7"."""
    first, *operations = re.findall(r"[+-]|\d+", expression)
    value, lines = int(first), []
    for sign, number in zip(operations[::2], operations[1::2], strict=True):
        result = value + int(number) if sign == "+" else value - int(number)
        lines.append(f"{value} {sign} {number} = {result}")
        value = result
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=new_folder, required=True, help="folder for sft.jsonl")
    parser.add_argument("--seed", type=number_type(int, **SEEDS), default=1)
    parser.add_argument("--rows", type=number_type(int, at_least=1), default=1200)
    parser.add_argument("--min_terms", type=number_type(int, at_least=2), default=2)
    parser.add_argument("--max_terms", type=number_type(int, at_least=2), default=3)
    parser.add_argument("--max_digits", type=number_type(int, at_least=1, at_most=15), default=1)
    options = parser.parse_args(arguments)
    if options.min_terms > options.max_terms:
        parser.error(f"--min_terms {options.min_terms} is more than --max_terms {options.max_terms}")
    with exit_on_mistake("worked_sums"):
        write_sums(options)


def write_sums(options: argparse.Namespace) -> None:
    sums = reasoning_gym.create_dataset(
        "chain_sum", size=options.rows, seed=options.seed, min_terms=options.min_terms, max_terms=options.max_terms,
        min_digits=1, max_digits=options.max_digits,
    )  # fmt: skip
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "sft.jsonl").open("w", encoding="utf-8") as file:
        for entry in sums:
            row = {"prompt": entry["question"], "response": worked_solution(entry["metadata"]["expression"])}
            assert row["response"].rpartition(" ")[2] == entry["answer"], entry
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
