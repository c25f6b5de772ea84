"""Top-level keys of --deepspeed_config: unknown ones are refused, known ones are those that DeepSpeed looks up."""

import json
from pathlib import Path

import pytest

from dschat.distributed.deepspeed_overrides import (
    GROUPS,
    NUMBERS,
    SET_BY_FLAGS,
    SWITCHES,
    deepspeed_keys,
    override_problems,
)


def problems_of(content: dict, folder: Path) -> list[str]:
    file = folder / "overrides.json"
    file.write_text(json.dumps(content))
    return override_problems(str(file), dtype="fp32", offload=False)


@pytest.mark.parametrize(
    "key, nearest",
    [
        ("zero_optimisation", "zero_optimization"),
        ("gradient_cliping", "gradient_clipping"),
        ("activation_checkpoint", "activation_checkpointing"),
        ("wallclock_breakdown", "wall_clock_breakdown"),
        ("ZeRO_optimization", "zero_optimization"),
        ("Aio", "aio"),
    ],
)
def test_a_misspelt_top_level_key_is_refused_with_the_nearest_key(key, nearest, tmp_path):
    (line,) = problems_of({key: {}, "steps_per_print": 10}, tmp_path)
    assert line.startswith(f"--deepspeed_config {tmp_path / 'overrides.json'}: {key} is not a key of a DeepSpeed")
    assert line.endswith(f"did you mean {nearest}?")


def test_an_unknown_key_without_a_similar_key_is_to_be_removed(tmp_path):
    (line,) = problems_of({"$schema": "x"}, tmp_path)
    assert "$schema is not a key" in line and line.endswith("remove it")


def test_all_unknown_keys_are_listed(tmp_path):
    assert len(problems_of({"zero_optimisation": {}, "gradient_cliping": 1.0}, tmp_path)) == 2


def test_known_keys_are_those_of_the_installed_deepspeed():
    """They include the keys of the tables of this module, but no keys inside groups."""
    tables = {*GROUPS, *NUMBERS, *SWITCHES, *(key.partition(".")[0] for key in SET_BY_FLAGS)}
    assert tables <= deepspeed_keys() and len(deepspeed_keys()) > 50
    assert not deepspeed_keys() & {"stage", "enabled", "offload_optimizer", "overlap_comm", "type", "params"}
