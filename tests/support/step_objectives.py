"""The objectives of steps 1 and 2 as their mains define them, and small random rows for each."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from programs import MAINS

from dschat import arguments
from dschat.data.collators import collate_preferences, collate_sft
from dschat.data.datasets import DataSplits
from dschat.data.mismatched import with_mismatched
from dschat.data.packing import packed
from dschat.preference.objective import preference_objective
from dschat.runs.fit import Objective


def main_of(step: str) -> Any:
    """The step's main.py as a module."""
    spec = importlib.util.spec_from_file_location(f"{step}_main", MAINS[step])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(kind: str, vocabulary: int, folder: Path) -> Dataset:
    """Rows of 4 to 31 tokens, some with equal prompts; reference log-probs are random."""
    draw, rows = random.Random(kind), []

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(4, vocabulary) for _ in range(draw.randint(least, most))]

    prompts = [tokens(2, 11) for _ in range(3)]
    for number in range(9):
        prompt, chosen, rejected = prompts[number % 3], tokens(2, 14), tokens(1, 20)
        ids, reference = prompt + chosen, [draw.uniform(-40, -10), draw.uniform(-40, -10)]
        if kind == "pairs":
            row = {"chosen_ids": ids, "rejected_ids": prompt + rejected, "margin": draw.random()}
            row["length"] = len(ids) + len(prompt + rejected)
        else:
            row = {"input_ids": ids, "desirable": number % 2 == 0, "length": len(ids)}
            row["loss_mask"] = [i >= len(prompt) and i % 5 > 0 for i in range(len(ids))]
        rows.append(row | {"prompt_length": len(prompt), "ref_logprobs": reference})
    if kind == "packed":
        return packed(Dataset.from_list(rows), capacity=40, seed=0, identity="", folder=str(folder))
    dataset = Dataset.from_list(rows)
    if kind == "unpaired":
        splits = DataSplits(train=dataset, eval=dataset.select([]), report=None)
        return with_mismatched(splits, max_tokens=31).train
    return dataset


def objectives(pad: int) -> dict[str, tuple[str, str, Objective]]:
    """Name → kind of rows, kind of model, objective."""

    def objective(collate: Callable, counted: str, loss_of: Callable) -> Objective:
        return Objective(
            collate=partial(collate, pad_token_id=pad), count=lambda batch: batch[counted].sum(), loss_of=loss_of,
            evaluation=dict,
        )  # fmt: skip

    sft = objective(collate_sft, "loss_mask", main_of("sft").loss_of)
    reward = objective(collate_preferences, "pair_mask", partial(main_of("reward").pairwise, centering_coef=0.1))
    preferences = {
        name: preference_objective(arguments.PreferenceArguments(preference_loss=name, beta=0.3), pad_token_id=pad)
        for name in ("dpo", "kto")
    }
    return {
        "sft": ("sft", "causal", sft), "packed sft": ("packed", "causal", sft), "reward": ("pairs", "scalar", reward),
        "dpo": ("pairs", "causal", preferences["dpo"]), "kto": ("unpaired", "causal", preferences["kto"]),
    }  # fmt: skip
