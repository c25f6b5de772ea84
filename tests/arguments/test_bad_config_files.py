"""An invalid --config file is reported in one line with file and line number."""

from __future__ import annotations

import pytest
from bad_input import mistakes

YAML = {  # text → line number in the message (None: only the file), part of the message
    "seed: 1\nmax_steps: 2\nseed: 3": (3, "--seed is set a second time (first in line 1)"),
    "seed: 1\nconfig: other.yaml": (2, "--config: a file of flags cannot include another"),
    "help: true": (1, "--help is not a flag"),
    "no_enable_hybrid_engine: true": (1, "write `enable_hybrid_engine: false`"),
    "\nsed: 1": (2, "did you mean --seed?"),
    "seed: {a: 1}": (1, "--seed: must be a plain value, not a mapping"),
    "output_dir: {a: 1}": (1, "--output_dir: must be a plain value, not a mapping"),
    "output_dir:\n  name: run": (1, "--output_dir: must be a plain value, not a mapping"),
    "seed: [1]": (1, "--seed: must be one value, not a list"),
    "output_dir: [a, b]": (1, "--output_dir: must be one value, not a list"),
    "enable_ema: [true]": (1, "--enable_ema: must be one value, not a list"),
    "data_path: [[a]]": (1, "--data_path: must be a list of plain values"),
    "data_path: [{a: b}]": (1, "--data_path: must be a list of plain values"),
    "data_path: [a, null]": (1, "--data_path: an item of the list is empty"),
    "data_path: [a, --seed]": (1, "or begins like a flag"),
    "data_path: {a: 1}": (1, "--data_path: must be a plain value"),
    "1: 2": (1, "1 is not a flag name"),
    "1.5: 2": (1, "1.5 is not a flag name"),
    "true: 2": (1, "true is not a flag name"),
    "null: 2": (1, "null is not a flag name"),
    "2024-01-01: 2": (1, "2024-01-01 is not a flag name"),
    "? [a, b]\n: 2": (1, "sequence is not a flag name"),
    "? {a: b}\n: 2": (1, "mapping is not a flag name"),
    "output_dir: 2024-01-01": (1, "--output_dir 2024-01-01: is a date"),
    "output_dir: 2024-01-01 10:00:00": (1, "is a date"),
    "seed: 2024-01-01": (1, "is a date"),
    "output_dir: 2024-13-45": (1, "--output_dir 2024-13-45: cannot be read"),
    "output_dir: !!binary aGk=": (1, "is binary data"),
    "output_dir: !!python/name:os.system ''": (1, "cannot be read"),
    "output_dir: !thing x": (1, "cannot be read"),
    "seed: !!int x": (1, "--seed x: cannot be read"),
    f"seed: {'9' * 5000}": (1, "cannot be read"),
    "output_dir: true": (1, "is true or false in YAML"),
    "resume: no": (1, "--resume no: is true or false in YAML"),
    'output_dir: "a\\0b"': (1, "NUL"),
    "seed: .nan": (1, "--seed nan"),
    "seed: 1.5": (1, "--seed 1.5"),
    "\nseed: -3": (2, "--seed -3: must be at least 0"),
    "adam_beta1: .inf": (1, "--adam_beta1 inf: must be"),
    "adam_beta1: .nan": (1, "--adam_beta1 nan: must be"),
    "\n\nadam_beta1: ten": (3, "--adam_beta1 ten"),
    "enable_ema: maybe": (1, "--enable_ema maybe"),
    "actor_zero_stage: 4": (1, "--actor_zero_stage 4: choose one of"),
    "overlong: --drop": (1, "--overlong"),
    "- seed": (None, "must contain lines of the form"),
    "seed": (None, "must contain lines of the form"),
    "3": (None, "must contain lines of the form"),
    "seed: [": (None, "not readable as YAML"),
    "seed: 1\n  max_steps: 2": (2, "not readable as YAML"),
    "seed: 'open": (1, "not readable as YAML"),
    "\tseed: 1": (1, "not readable as YAML"),
    "seed: *nothing": (1, "not readable as YAML"),
    "seed: 1\n---\nseed: 2": (2, "not readable as YAML"),
    "<<: 3": (1, "not readable as YAML"),
    "seed: \x01": (None, "not readable as YAML"),
    f"seed: {'[' * 10000}": (None, "not readable as YAML"),
    f"{'x' * 5000}: 1": (None, ""),
    f"seed: {'x' * 5000}": (1, "--seed xxx"),
}  # fmt: skip


@pytest.mark.parametrize("text", YAML, ids=lambda text: repr(text[:40]))
def test_a_mistake_in_a_config_is_reported_in_one_line_with_file_and_line(text, tmp_path):
    line_number, part = YAML[text]
    file = tmp_path / "flags.yaml"
    file.write_text(text, encoding="utf-8")
    (line,) = mistakes("ppo", "--config", str(file))
    assert (f"{file}:{line_number}" if line_number else str(file)) in line and part in line, line
    assert len(line) < 600


@pytest.mark.parametrize(
    ("content", "part"),
    [(None, "is a folder"), (b"seed: \xff", "not UTF-8"), (b"\xff\xfes\x00", "not UTF-8"), (b"x" * (1 << 21), "MiB")],
)
def test_a_config_that_is_not_a_text_file_is_refused(content, part, tmp_path):
    file = tmp_path / "flags.yaml"
    file.mkdir() if content is None else file.write_bytes(content)
    (line,) = mistakes("sft", "--config", str(file))
    assert line.startswith(f"  - --config {file}") and part in line


def test_valid_configs_are_accepted_and_flags_override_them(tmp_path):
    file = tmp_path / "flags.yaml"
    valid = [
        "", "# nothing", "seed:", "data_path: []", "best_metric: -loss", "\ufeffseed: 1", "reward_timeout: .inf",
        "output_dir: '2024-01-01'", "kl_coef: 1e-3", "data_path: [a, b]", "data_path: a",
    ]  # fmt: skip
    for text in valid:
        file.write_text(text, encoding="utf-8")
        assert mistakes("ppo", "--config", str(file)) == [], text
    file.write_text("seed: -1\nmax_steps: -1")
    lines = mistakes("sft", "--config", str(file), "--seed", "-2")
    assert lines[0].endswith("9223372036854775807") and lines[1].endswith(f"(set in {file}:2)")
