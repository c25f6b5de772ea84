"""Input that cannot work, by kind: each is answered at once by one message that names flag, file and line.

The tables are crossed: every float flag of every program with every number that it cannot be, and so on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pyarrow
import pyarrow.parquet
import pytest
from step_materials import write_materials
from tiny_models import CONFIGS, tiny_causal_lm, tiny_classifier
from tiny_tokenizers import make_tokenizer
from transformers import AutoConfig

from dschat import arguments
from dschat.arguments.command_line import SettingsError, group_types, parse
from dschat.arguments.script_inputs import read_json
from dschat.arguments.strict_json import read_json_object
from dschat.checkpoints.manifest import read_manifest
from dschat.data.sources.files import file_rows
from dschat.models.folder_check import causal_problems, shape_problems
from dschat.models.weight_files import weight_problems
from dschat.runs.validation import model_problems

STEPS = {
    "sft": (arguments.SFTSettings, ["--model_name_or_path", "hub/name", "--data_path", "rows.jsonl"]),
    "reward": (arguments.RewardModelSettings, ["--model_name_or_path", "hub/name", "--data_path", "rows.jsonl"]),
    "dpo": (arguments.PreferenceSettings, ["--model_name_or_path", "hub/name", "--data_path", "rows.jsonl"]),
    "ppo": (arguments.RLHFSettings, ["--actor_model_name_or_path", "hub/name", "--data_path", "rows.jsonl"]),
    "pairs": (arguments.PairSettings, ["--model_name_or_path", "hub/name", "--data_path", "rows.jsonl"]),
}


def mistakes(step: str, *argv: str) -> list[str]:
    """The lines of the one SettingsError; [] if there is none."""
    settings, needed = STEPS[step]
    try:
        parse(settings, [*needed, *argv], description="")
    except SettingsError as error:
        return str(error).split("\n")[1:]
    return []


def kinds(hint: Any) -> tuple:
    """The types that a field takes, without None and the type of a list's items."""
    inside = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(get_args(kind)[0] if get_origin(kind) is list else kind for kind in inside)


def numeric_flags(kind: type) -> list[tuple[str, dataclasses.Field]]:
    """A program and a field for each flag of the type; a flag that programs share is tried in the first one."""
    found: dict[str, tuple[str, dataclasses.Field]] = {}
    for step, (settings, _) in STEPS.items():
        for group in group_types(settings).values():
            hints = get_type_hints(group)
            for field in dataclasses.fields(group):
                if field.init and kind in kinds(hints[field.name]):
                    found.setdefault(field.name, (step, field))
    return list(found.values())


FLOATS, INTEGERS = numeric_flags(float), numeric_flags(int)
UNLIMITED = {"reward_timeout", "judge_timeout"}
NO_FLOATS = ["nan", "-nan", "inf", "-inf", "1e999", "1e300", "-1e300", "", "1,5", "ten", "0x10", "9" * 5000]
NO_INTEGERS = ["1.5", "nan", "inf", "1e3", "", "ten", str(2**63), str(-(2**63) - 1), "9" * 5000, "1\n2"]


def float_or_none(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def test_the_tables_hold_the_flags():
    assert len(FLOATS) > 40 and len(INTEGERS) > 30
    assert {field.name for _, field in FLOATS if not field.metadata["bounds"].finite} == UNLIMITED


@pytest.mark.parametrize("number", NO_FLOATS, ids=lambda text: text[:9])
def test_no_float_flag_takes_what_is_no_finite_number(number):
    for step, field in FLOATS:
        if field.name in UNLIMITED and float_or_none(number) == math.inf:
            assert mistakes(step, f"--{field.name}={number}") == [], field.name
            continue
        lines = mistakes(step, f"--{field.name}={number}")  # the first, before what follows from its value
        assert lines and lines[0].startswith(f"  - --{field.name} "), (field.name, lines)
        assert all(len(line) < 300 for line in lines), lines


@pytest.mark.parametrize("number", NO_INTEGERS, ids=lambda text: repr(text[:9]))
def test_no_integer_flag_takes_what_is_no_integer_of_64_bits(number):
    for step, field in INTEGERS:
        lines = mistakes(step, f"--{field.name}={number}")  # the first, before what follows from its value
        assert lines and lines[0].startswith(f"  - --{field.name} "), (field.name, lines)
        assert all(len(line) < 300 for line in lines), lines


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("seed", ["-1", str(2**63), str(-(2**64))])
def test_a_seed_is_one_that_numpy_and_torch_take(step, seed):
    (line,) = mistakes(step, "--seed", seed)
    assert line.startswith(f"  - --seed {seed}: must be at least 0 and at most {2**63 - 1}")
    assert mistakes(step, "--seed", str(2**63 - 1)) == mistakes(step, "--seed", "0") == []


@pytest.mark.parametrize("name", ["collective_timeout", "rendezvous_timeout"])
def test_a_wait_is_one_that_timers_can_count(name):
    (line,) = mistakes("sft", f"--{name}", "1e9")
    assert line == f"  - --{name} 1000000000.0: must be above 0 and at most 100000000.0"


YAML = {  # text → line of the mistake (None: of the whole file), part of the message
    "seed: 1\nmax_steps: 2\nseed: 3": (3, "--seed is set a second time (first in line 1)"),
    "seed: 1\nconfig: other.yaml": (2, "--config: a file of flags cannot name another"),
    "help: true": (1, "--help is no flag"),
    "no_enable_hybrid_engine: true": (1, "write `enable_hybrid_engine: false`"),
    "\nsed: 1": (2, "did you mean --seed?"),
    "seed: {a: 1}": (1, "--seed: wants a plain value, not a mapping"),
    "output_dir: {a: 1}": (1, "--output_dir: wants a plain value, not a mapping"),
    "output_dir:\n  name: run": (1, "--output_dir: wants a plain value, not a mapping"),
    "seed: [1]": (1, "--seed: wants one value, not a list"),
    "output_dir: [a, b]": (1, "--output_dir: wants one value, not a list"),
    "enable_ema: [true]": (1, "--enable_ema: wants one value, not a list"),
    "data_path: [[a]]": (1, "--data_path: wants a list of plain values"),
    "data_path: [{a: b}]": (1, "--data_path: wants a list of plain values"),
    "data_path: [a, null]": (1, "--data_path: an item of the list is empty"),
    "data_path: [a, --seed]": (1, "or begins like a flag"),
    "data_path: {a: 1}": (1, "--data_path: wants a plain value"),
    "1: 2": (1, "1 is no name of a flag"),
    "1.5: 2": (1, "1.5 is no name of a flag"),
    "true: 2": (1, "true is no name of a flag"),
    "null: 2": (1, "null is no name of a flag"),
    "2024-01-01: 2": (1, "2024-01-01 is no name of a flag"),
    "? [a, b]\n: 2": (1, "sequence is no name of a flag"),
    "? {a: b}\n: 2": (1, "mapping is no name of a flag"),
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
    "- seed": (None, "wants lines of the form"),
    "seed": (None, "wants lines of the form"),
    "3": (None, "wants lines of the form"),
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
def test_a_mistake_in_a_config_is_one_line_with_file_and_line(text, tmp_path):
    place, part = YAML[text]
    file = tmp_path / "flags.yaml"
    file.write_text(text, encoding="utf-8")
    (line,) = mistakes("ppo", "--config", str(file))
    assert (f"{file}:{place}" if place else str(file)) in line and part in line, line
    assert len(line) < 600


@pytest.mark.parametrize(
    ("content", "part"),
    [(None, "is a folder"), (b"seed: \xff", "not UTF-8"), (b"\xff\xfes\x00", "not UTF-8"), (b"x" * (1 << 21), "MiB")],
)
def test_a_config_that_is_no_yaml_file(content, part, tmp_path):
    file = tmp_path / "flags.yaml"
    file.mkdir() if content is None else file.write_bytes(content)
    (line,) = mistakes("sft", "--config", str(file))
    assert line.startswith(f"  - --config {file}") and part in line


def test_what_works_in_a_config(tmp_path):
    file = tmp_path / "flags.yaml"
    working = [
        "", "# nothing", "seed:", "data_path: []", "best_metric: -loss", "\ufeffseed: 1", "reward_timeout: .inf",
        "output_dir: '2024-01-01'", "kl_coef: 1e-3", "data_path: [a, b]", "data_path: a",
    ]  # fmt: skip
    for text in working:
        file.write_text(text, encoding="utf-8")
        assert mistakes("ppo", "--config", str(file)) == [], text
    file.write_text("seed: -1\nmax_steps: -1")
    lines = mistakes("sft", "--config", str(file), "--seed", "-2")
    assert lines[0].endswith("9223372036854775807") and lines[1].endswith(f"(set in {file}:2)")


DEEP = 10_000
JSON = {  # what no JSON reader takes → part of the message
    b"": "it is empty",
    b" \n": "it is empty",
    b"{": "not valid JSON",
    b"{'a': 1}": "not valid JSON",
    b'{"a": 1,}': "not valid JSON",
    b'{"a": 1} {"b": 2}': "not valid JSON",
    b"\x00": "not valid JSON",
    b'{"a": tru}': "not valid JSON",
    b"[" * DEEP: "nested deeper than 100",
    b"[" * DEEP + b"]" * DEEP: "nested deeper than 100",
    b'{"a":' * DEEP + b"1" + b"}" * DEEP: "nested deeper than 100",
    b"[" * 500 + b"]" * 500: "nested deeper than 100",
    b'{"a":' * 102 + b"1" + b"}" * 102: "nested deeper than 100",
    b'{"a": ' + b"9" * 5000 + b"}": "5000 digits is beyond float64",
    b'{"a": -' + b"9" * 400 + b"}": "400 digits is beyond float64",
    b'{"a": "gr\xfcn"}': "no UTF-8 at line 1, byte 10",
    b'{\n"a": "\xff"}': "no UTF-8 at line 2, byte 7",
    '{"a": 1}'.encode("utf-16"): "no UTF-8",
    b'{"a": "\\ud800"}': "lone",
    b'{"\\udfff": 1}': "lone",
    b'{"a": [["\\ud83d x"]]}': "lone",
}  # fmt: skip
STRICT = {  # what readers of settings do not take either
    b'{"a": NaN}': "NaN is no JSON number",
    b'{"a": -Infinity}': "-Infinity is no JSON number",
    b'{"a": 1e400}': "1e400 is beyond float64",
    b'{"a": 1, "a": 2}': "'a' occurs twice",
    b'{"b": {"a": 1, "a": 2}}': "'a' occurs twice",
}


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 400, text
    return text


@pytest.mark.parametrize("content", JSON | STRICT, ids=lambda content: repr(content[:20]))
def test_no_reader_takes_what_is_no_json(content, tmp_path):
    part = (JSON | STRICT)[content]
    file = tmp_path / "settings.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_json_object(file, unique_keys=True)
    assert str(file) in one_line(caught) and part in str(caught.value)
    (line,) = mistakes("sft", "--deepspeed_config", str(file))
    assert line.startswith(f"  - --deepspeed_config {file}: ") and part in line
    (tmp_path / "manifest.json").write_bytes(content)
    if content in JSON:
        with pytest.raises(ValueError, match="manifest.json cannot be read"):
            read_manifest(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_bytes(content)
        (line,) = [line for line in weight_problems(tmp_path) if "index.json" in line]
        assert part in line and line.endswith("copy it again")


@pytest.mark.parametrize("content", [b"[]", b"3", b"null", b'"a"', b"true", b"1.5"])
def test_an_object_is_wanted(content, tmp_path):
    file = tmp_path / "settings.json"
    file.write_bytes(content)
    (line,) = mistakes("sft", "--deepspeed_config", str(file))
    assert line.startswith(f"  - --deepspeed_config {file}: wants a JSON object")


def test_a_folder_and_a_missing_file_are_no_json(tmp_path):
    for path, part in ((tmp_path, "is a folder"), (tmp_path / "none.json", "No such file")):
        (line,) = mistakes("sft", "--deepspeed_config", str(path))
        assert line.startswith(f"  - --deepspeed_config {path}: {part}")


@pytest.mark.parametrize("content", [c for c in JSON if b"\n" not in c and c.strip()], ids=lambda c: repr(c[:20]))
def test_a_bad_row_is_named_by_file_and_line_and_the_next_is_read(content, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"n": 1}\n' + content.replace(b"\n", b" ") + b'\n{"n": NaN}\n')
    rows = list(file_rows(file))
    assert [row.fields is None for row in rows] == [False, True, False]
    assert rows[1].where == f"{file}:2" and rows[1].fault and "\n" not in rows[1].fault


ARRAYS = {  # items of one array: what of them is reported, and for the whole file or for the row alone
    b'[{"n": 1},\n' + b"[" * DEEP: ("nested deeper", True),
    b'[{"n": 1},\n{"n": ' + b"9" * 5000 + b"}]": ("beyond float64", True),
    b'[{"n": 1},\n{"n": ' + b"[" * 150 + b"]" * 150 + b"}]": ("nested deeper", False),
    b'[{"n": 1},\n{"n": "\\ud800"}]': ("lone", False),
    b'[{"n": 1},\n3]': ("not a JSON object", False),
}


@pytest.mark.parametrize("content", ARRAYS, ids=lambda content: repr(content[10:40]))
def test_a_bad_item_of_an_array_is_named_by_file_and_line(content, tmp_path):
    part, whole = ARRAYS[content]
    file = tmp_path / "rows.json"
    file.write_bytes(content)
    if whole:
        with pytest.raises(ValueError) as caught:
            list(file_rows(file))
        assert f"{file}:2: " in one_line(caught) and part in str(caught.value)
    else:
        _, row = file_rows(file)
        assert row.where == f"{file}:2" and part in row.fault


def test_tables_whose_text_is_no_utf8(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_bytes("prömpt,response\na,b\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"rows\.csv:1: the names of the columns are not valid UTF-8"):
        list(file_rows(file))
    text = pyarrow.array([b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"rows\.parquet: not a readable parquet file"):
        list(file_rows(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("content", JSON, ids=lambda content: repr(content[:20]))
def test_scripts_name_the_file_too(content, tmp_path):
    file = tmp_path / "run.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_json(file)
    assert one_line(caught).startswith(f"{file}: ")


DEEPSPEED = {  # content → key (or kind of mistake) in the message, the flag that owns it or what is wrong
    '{"train_batch_size": 4}': ("train_batch_size", "--per_device_train_batch_size"),
    '{"train_micro_batch_size_per_gpu": 4}': ("train_micro_batch_size_per_gpu", "--per_device_train_batch_size"),
    '{"gradient_accumulation_steps": 2}': ("gradient_accumulation_steps", "--gradient_accumulation_steps"),
    '{"gradient_clipping": 1.0}': ("gradient_clipping", "--max_grad_norm"),
    '{"gradient_clipping": "x"}': ("gradient_clipping", "--max_grad_norm"),
    '{"optimizer": {"type": "Adam"}}': ("optimizer", "--learning_rate"),
    '{"optimizer": null}': ("optimizer", "--learning_rate"),
    '{"scheduler": {"type": "WarmupLR"}}': ("scheduler", "--lr_scheduler_type"),
    '{"bf16": {"enabled": false}}': ("bf16.enabled", "--dtype"),
    '{"bf16": {"enabled": "yes"}}': ("bf16.enabled", "--dtype"),
    '{"bf16": {"enabled": 1}}': ("bf16.enabled", "--dtype"),
    '{"fp16": {"enabled": true}}': ("fp16.enabled", "--dtype"),
    '{"bfloat16": {"enabled": true}}': ("bfloat16", "--dtype"),
    '{"amp": {"enabled": true}}': ("amp", "--dtype"),
    '{"torch_autocast": {"enabled": true}}': ("torch_autocast", "--dtype"),
    '{"data_types": {"grad_accum_dtype": "fp16"}}': ("data_types.grad_accum_dtype", "--dtype"),
    '{"zero_optimization": {"stage": 3}}': ("zero_optimization.stage", "--zero_stage"),
    '{"zero_optimization": {"stage": 7}}': ("zero_optimization.stage", "--zero_stage"),
    '{"zero_optimization": {"cpu_offload": true}}': ("zero_optimization.cpu_offload", "--offload"),
    '{"elasticity": {"enabled": true}}': ("elasticity", "the launcher"),
    '{"autotuning": {"enabled": true}}': ("autotuning", "--zero_stage"),
    '{"zero_optimization": true}': ("zero_optimization", "must be an object, not true or false"),
    '{"zero_optimization": [2]}': ("zero_optimization", "must be an object, not a list"),
    '{"bf16": null}': ("bf16", "must be an object, not null"),
    '{"bf16": true}': ("bf16", "must be an object, not true or false"),
    '{"fp16": "auto"}': ("fp16", "must be an object, not a string"),
    '{"data_types": []}': ("data_types", "must be an object, not a list"),
    '{"aio": 1}': ("aio", "must be an object, not a number"),
    '{"activation_checkpointing": "yes"}': ("activation_checkpointing", "must be an object"),
    '{"flops_profiler": 3}': ("flops_profiler", "must be an object"),
    '{"compile": true}': ("compile", "must be an object"),
    '{"wall_clock_breakdown": "yes"}': ("wall_clock_breakdown", "must be true or false, not a string"),
    '{"prescale_gradients": 1}': ("prescale_gradients", "must be true or false, not a number"),
    '{"steps_per_print": "often"}': ("steps_per_print", "must be a number, not a string"),
    '{"gradient_predivide_factor": true}': ("gradient_predivide_factor", "must be a number"),
    '{"zero_optimization": {"overlap_com": true}}': ("overlap_com", "Extra inputs"),
    '{"zero_optimization": {"reduce_bucket_size": "big"}}': ("reduce_bucket_size", "valid integer"),
    '{"zero_optimization": {"reduce_bucket_size": -1}}': ("reduce_bucket_size", "greater than 0"),
    '{"zero_optimization": {"reduce_bucket_size": 1.5}}': ("reduce_bucket_size", "valid integer"),
    '{"zero_optimization": {"overlap_comm": "maybe"}}': ("overlap_comm", "valid boolean"),
    '{"zero_optimization": {"overlap_comm": [1]}}': ("overlap_comm", "valid boolean"),
    '{"zero_optimization": {"offload_optimizer": {"device": "disk"}}}': ("offload_optimizer.device", "'cpu'"),
    '{"zero_optimization": {"offload_optimizer": "cpu"}}': ("offload_optimizer", ""),
    '{"zero_optimization": {"offload_param": {"devise": "cpu"}}}': ("offload_param.devise", "Extra inputs"),
    '{"zero_optimization": {"offload_param": {"buffer_count": "x"}}}': ("offload_param.buffer_count", "valid integer"),
    '{"zero_optimization": {"stage3_max_live_parameters": -5}}': ("max_live_parameters", "greater than"),
    '{"fp16": {"loss_scale": "big"}}': ("loss_scale", "must be a number"),
    '{"fp16": {"initial_scale_power": []}}': ("initial_scale_power", "valid integer"),
    '{"fp16": {"loss_scal": 1}}': ("loss_scal", ""),
    '{"comms_logger": {"enabled": "perhaps"}}': ("enabled", "valid boolean"),
    '{"flops_profiler": {"enabled": "perhaps"}}': ("", "DeepSpeed refuses it"),
    '{"tensorboard": {"enabled": "perhaps"}}': ("enabled", "valid boolean"),
    '{"compile": {"deepcompile": "perhaps"}}': ("deepcompile", "valid boolean"),
    '{"checkpoint": {"tag_validation": "sometimes"}}': ("", "DeepSpeed refuses it"),
}  # fmt: skip


@pytest.mark.parametrize("content", DEEPSPEED)
def test_a_deepspeed_config_names_the_key_and_the_flag_that_owns_it(content, tmp_path):
    key, part = DEEPSPEED[content]
    file = tmp_path / "deepspeed.json"
    file.write_text(content)
    (line,) = mistakes("sft", "--deepspeed_config", str(file))
    assert line.startswith(f"  - --deepspeed_config {file}: ") and key in line and part in line, line


def test_what_works_in_a_deepspeed_config(tmp_path):
    file = tmp_path / "deepspeed.json"
    working = [
        "{}", '{"bf16": {"enabled": true}}', '{"fp16": {"enabled": false, "loss_scale_window": 100}}',
        '{"zero_optimization": {"overlap_comm": false, "reduce_bucket_size": 500000}}',
        '{"wall_clock_breakdown": true}',
        '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}', '{"aio": {"block_size": 1048576}}',
        '{"activation_checkpointing": {"partition_activations": true}}', '{"steps_per_print": 10}',
    ]  # fmt: skip
    for content in working:
        file.write_text(content)
        for step in ("sft", "dpo", "ppo"):
            assert mistakes(step, "--deepspeed_config", str(file)) == [], content


def edited(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(content | changes), encoding="utf-8")

    return edit


def written(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


MODELS = {  # what is done to the folder of a good causal language model → part of the message
    "hidden size": (edited("config.json", hidden_size=64), "contradicts the weights"),
    "vocabulary": (edited("config.json", vocab_size=7), "contradicts the weights"),
    "feed-forward size": (edited("config.json", intermediate_size=40), "contradicts the weights"),
    "key heads": (edited("config.json", num_key_value_heads=4), "contradicts the weights"),
    "head size": (edited("config.json", head_dim=16), "contradicts the weights"),
    "more layers": (edited("config.json", num_hidden_layers=5), "num_hidden_layers is 5, and the files hold 2"),
    "negative size": (edited("config.json", hidden_size=-32), ""),
    "size is text": (edited("config.json", hidden_size="wide"), ""),
    "size is null": (edited("config.json", hidden_size=None), ""),
    "unknown activation": (edited("config.json", hidden_act="none_such"), "describes no model"),
    "unknown architecture": (edited("config.json", model_type="none_such"), "no model configuration"),
    "a classifier": (edited("config.json", architectures=["LlamaForSequenceClassification"]), "does not continue text"),
    "tagger": (edited("config.json", architectures=["LlamaForTokenClassification"]), "does not continue text"),
    "an encoder": (edited("config.json", architectures=["BertForMaskedLM"], model_type="bert"), "does not continue"),
    "encoder and decoder": (edited("config.json", architectures=["T5Model"], model_type="t5"), "no decoders"),
    "template": (written("chat_template.jinja", b"{% for m in messages %}"), "no valid Jinja (line 1"),
    "template's braces": (written("chat_template.jinja", b"a\n{{ messages"), "no valid Jinja (line 2"),
    "template's tag": (written("chat_template.jinja", b"\n\n{% whilst %}"), "no valid Jinja (line 3"),
    "tokenizer's model": (edited("tokenizer.json", model={"type": "None"}), "no tokenizer could be loaded"),
    "tokenizer's vocabulary": (edited("tokenizer.json", model=3), "no tokenizer could be loaded"),
    "tokenizer's version": (edited("tokenizer.json", version="99"), "no tokenizer could be loaded"),
    "weights cut short": (written("model.safetensors", b"\x10\0\0\0\0\0\0\0{}"), "is damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no model configuration"),
    "no tokenizer": (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], "has no tokenizer"),
} | {
    f"{name} {content[:12]!r}": (written(name, content), name)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    for content in [*(c for c in JSON), b"[]", b"3", b"null"]
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_materials(folder, make_tokenizer(eos="</s>", pad="<pad>"))
    return folder / "actor"


@pytest.mark.parametrize("name", MODELS)
def test_a_broken_model_folder_is_one_line_before_anything_is_loaded(name, model, tmp_path):
    damage, part = MODELS[name]
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    damage(folder)
    lines = model_problems("--actor", str(folder), tokens=8, lengths="--max_seq_len 8", causal=True)
    assert lines and all(line.startswith(f"--actor {folder}: ") and "\n" not in line for line in lines), lines
    assert any(part in line for line in lines), lines


def test_a_model_folder_that_works_and_a_file_in_its_place(model):
    check = partial(model_problems, "--actor", tokens=8, lengths="--max_seq_len 8", causal=True)
    assert check(str(model)) == []
    assert "is a file; name the folder" in check(str(model / "model.safetensors"))[0]
    assert model_problems("--critic", str(model.parent / "reward"), tokens=8, lengths="") == []


@pytest.mark.parametrize("name", CONFIGS)
def test_no_architecture_is_said_to_contradict_its_own_weights(name, tmp_path):
    for kind, build in (("causal", tiny_causal_lm), ("classifier", tiny_classifier)):
        if kind == "classifier" and name in ("cohere", "granite"):  # transformers has no classifiers of them
            continue
        build(name).save_pretrained(tmp_path / kind)
        config = AutoConfig.from_pretrained(tmp_path / kind)
        assert shape_problems(tmp_path / kind, config) == []
        assert bool(causal_problems(config)) == (kind == "classifier")
