"""Flags with invalid values: each is reported in one line that names the flag.

Every float flag of every program is tried with every invalid number, every integer flag likewise, and so on.
"""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from bad_input import STEPS, mistakes

from dschat.arguments.command_line import group_types
from dschat.rlhf.validation import rlhf_problems


def accepted_types(hint: Any) -> tuple:
    """The types that a field accepts, without None; for a list, the type of its items."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(get_args(kind)[0] if get_origin(kind) is list else kind for kind in members)


def flags_of(kind: type) -> list[tuple[str, dataclasses.Field]]:
    """(program, field) of each flag of the type; a flag of several programs is listed for the first one."""
    flags: dict[str, tuple[str, dataclasses.Field]] = {}
    for step, (settings, _) in STEPS.items():
        for group in group_types(settings).values():
            hints = get_type_hints(group)
            for field in dataclasses.fields(group):
                if field.init and kind in accepted_types(hints[field.name]):
                    flags.setdefault(field.name, (step, field))
    return list(flags.values())


FLOATS, INTEGERS = flags_of(float), flags_of(int)
UNLIMITED = {"reward_timeout", "judge_timeout"}
INVALID_FLOATS = ["1e-40", "1e30", "nan", "-nan", "inf", "-inf", "1e999", "1e300", "-1e300", "", "1,5", "ten", "0x10",
             "9" * 5000]  # fmt: skip
INVALID_INTEGERS = ["2147483648", "1.5", "nan", "inf", "1e3", "", "ten", str(2**63), str(-(2**63) - 1), "9" * 5000,
               "1\n2"]  # fmt: skip


TEXTS = flags_of(str)
INVALID_TEXTS = {
    "": "is empty", " ": "is empty", "a\nb": "contains a line break", "a\x1b[31mb": "control character",
    "a\udcffb": "is not valid UTF-8", "x" * 300: "has 300 bytes", "a/" * 3000: "has 6000 bytes",
}  # fmt: skip
STRAY_ARGUMENTS = [
    ["--no_such", "3"], ["-x"], ["--seed"], ["--seed", "1", "2"], ["--seed=1", "--seed=x"], ["--="],
    ["--SEED", "1"], ["---seed", "1"], ["--seed", "1", "--", "x"], ["--config"],
]  # fmt: skip
PATHS = ["--output_dir", "--data_output_path", "--tensorboard_path"]


def float_or_none(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def test_flags_of_every_type_are_collected():
    assert len(FLOATS) > 40 and len(INTEGERS) > 30
    assert {field.name for _, field in FLOATS if not field.metadata["bounds"].finite} == UNLIMITED


@pytest.mark.parametrize("number", INVALID_FLOATS, ids=lambda text: text[:9])
def test_every_float_flag_refuses_invalid_numbers(number):
    for step, field in FLOATS:
        if field.name in UNLIMITED and float_or_none(number) == math.inf:
            assert mistakes(step, f"--{field.name}={number}") == [], field.name
            continue
        lines = mistakes(step, f"--{field.name}={number}")  # problems that follow from the value come later
        assert lines and lines[0].startswith(f"  - --{field.name} "), (field.name, lines)
        assert all(len(line) < 300 for line in lines), lines


@pytest.mark.parametrize("number", INVALID_INTEGERS, ids=lambda text: repr(text[:9]))
def test_every_integer_flag_refuses_invalid_integers(number):
    for step, field in INTEGERS:
        if field.name == "seed" and number == "2147483648":
            continue
        lines = mistakes(step, f"--{field.name}={number}")  # problems that follow from the value come later
        assert lines and lines[0].startswith(f"  - --{field.name} "), (field.name, lines)
        assert all(len(line) < 300 for line in lines), lines


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("seed", ["-1", str(2**63), str(-(2**64))])
def test_a_seed_must_be_in_the_range_of_numpy_and_torch(step, seed):
    (line,) = mistakes(step, "--seed", seed)
    assert line.startswith(f"  - --seed {seed}: must be at least 0 and at most {2**63 - 1}")
    assert mistakes(step, "--seed", str(2**63 - 1)) == mistakes(step, "--seed", "0") == []


@pytest.mark.parametrize("name", ["collective_timeout", "rendezvous_timeout"])
def test_a_timeout_must_be_in_the_range_of_timers(name):
    (line,) = mistakes("sft", f"--{name}", "1e9")
    assert line == f"  - --{name} 1000000000.0: must be above 0 and at most 100000000.0"


@pytest.mark.parametrize("text", INVALID_TEXTS, ids=lambda text: repr(text[:9]))
def test_every_text_flag_refuses_invalid_text(text):
    for step, field in TEXTS:
        if text == "" and field.default == "":
            continue  # reported as a missing value by the group
        lines = [line for line in mistakes(step, f"--{field.name}={text}") if f"--{field.name}" in line]
        assert lines and all(len(line) < 400 and "\n" not in line for line in lines), (field.name, lines)
        assert INVALID_TEXTS[text] in lines[0] or "choose one of" in lines[0], (field.name, lines)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("stray", STRAY_ARGUMENTS, ids=" ".join)
def test_stray_arguments_are_refused(stray, step):
    lines = mistakes(step, *stray)
    assert lines and all(len(line) < 400 for line in lines)


@pytest.mark.parametrize("flag", PATHS)
@pytest.mark.parametrize("path", ["~/x", "/dev/null", "/dev/null/below"])
def test_a_path_that_cannot_become_a_folder_is_refused(flag, path):
    (line,) = mistakes("sft", f"{flag}={path}")
    assert line.startswith(f"  - {flag} {path}: "), line


@pytest.mark.parametrize(
    "flag",
    ["num_samples_per_prompt", "per_device_training_batch_size", "gradient_accumulation_steps", "generation_batches"],
)
def test_a_number_out_of_bounds_does_not_hide_problems_of_other_flags(flag):
    lines = mistakes("ppo", f"--{flag}=0", "--max_prompt_seq_len=0", check=rlhf_problems)
    assert sum(line.startswith(f"  - --{flag} 0: must be at least 1") for line in lines) == 1
    assert sum("--max_prompt_seq_len" in line for line in lines) == 1
    assert any("--reward: name a reward model" in line for line in lines), lines
