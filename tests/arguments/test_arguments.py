"""Argument groups: flag names, compatible groups, and early rejection of invalid values."""

import dataclasses
import inspect
import json
from typing import get_args

import pytest

from dschat import arguments
from dschat.arguments.command_line import SettingsError, group_types, parse
from dschat.arguments.flags import ResumePolicy, flag, out_of_bounds

GROUPS = [group for _, group in inspect.getmembers(arguments, dataclasses.is_dataclass) if hasattr(group, "problems")]
PROGRAMS = (
    arguments.SFTSettings, arguments.RewardModelSettings, arguments.PreferenceSettings, arguments.PairSettings,
    arguments.RLHFSettings,
)  # fmt: skip
STEPS = {"sft": arguments.SFTSettings, "reward": arguments.RewardModelSettings, "ppo": arguments.RLHFSettings}


def flag_names(settings: type) -> list[str]:
    return [field.name for group in group_types(settings).values() for field in dataclasses.fields(group)]


@pytest.mark.parametrize("settings", PROGRAMS)
def test_no_flag_of_a_program_is_declared_twice(settings):
    flags = flag_names(settings)
    assert len(flags) == len(set(flags)) > 0


def test_a_flag_without_a_resume_policy_is_an_error():
    with pytest.raises(TypeError, match="on_resume"):
        flag(1, "steps")


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_flag_has_a_help_sentence_a_resume_policy_a_default_within_bounds_and_existing_needs(group):
    assert out_of_bounds(group()) == []
    for field in dataclasses.fields(group):
        text, optional = field.metadata["help"], type(None) in get_args(field.type)
        assert text[0].isupper() and text[-1] in ".)" and len(text) > 10, text
        assert not optional or field.default is not None or "Default: " in text, f"{field.name}: None is unexplained"
        assert field.metadata["on_resume"] in get_args(ResumePolicy)
        for need in field.metadata["needs"]:
            name, _, value = need.partition("=")
            others = {f.name: f for g in GROUPS for f in dataclasses.fields(g)}
            declared = others[name].metadata["choices"] or [
                choice for part in (others[name].type, *get_args(others[name].type)) for choice in get_args(part)
            ]
            assert not value or value in declared, need
            assert name in others, need


def problems(group: type, **values) -> list[str]:
    return group(**values).problems()


def test_invalid_values_are_refused_with_flag_value_and_remedy(tmp_path, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        (line,) = problems(arguments.DeviceArguments, dtype="fp16")
        assert "--dtype fp16" in line and "bf16 or fp32" in line
    assert problems(arguments.DeviceArguments, dtype="bf16") == []
    broken = tmp_path / "ds.json"
    for text, reason in (("{", "not valid JSON"), ("[1]", "JSON object")):
        broken.write_text(text)
        (line,) = problems(arguments.DeviceArguments, deepspeed_config=str(broken))
        assert line.startswith(f"--deepspeed_config {broken}: ") and reason in line
    broken.write_text(json.dumps({"wall_clock_breakdown": True}))
    assert problems(arguments.DeviceArguments, deepspeed_config=str(broken)) == []
    (line,) = problems(arguments.DeviceArguments, deepspeed_config=str(tmp_path / "none.json"))
    assert "No such file" in line


def test_an_unwritable_output_folder_is_refused_and_validation_creates_no_folder(tmp_path):
    file = tmp_path / "file"
    file.touch()
    (line,) = problems(arguments.RunArguments, output_dir=str(file / "run"))
    assert line.startswith(f"--output_dir {file}/run: cannot be written")
    assert problems(arguments.RunArguments, output_dir=str(tmp_path / "new" / "run")) == []
    assert not (tmp_path / "new").exists(), "other settings may be invalid: validation creates nothing"


def test_missing_required_flags_are_reported():
    assert "--data_path" in problems(arguments.DataArguments)[0]
    assert "--model_name_or_path" in problems(arguments.ModelArguments)[0]
    (actor,) = problems(arguments.RLHFModelArguments)
    assert "--actor_model_name_or_path" in actor
    assert problems(arguments.RLHFModelArguments, actor_model_name_or_path="a") == []


def test_flags_that_depend_on_each_other_are_validated_together(tmp_path):
    for values in ({"unsup_coef": 1.0}, {"unsupervised_dataset_name": "texts.jsonl"}):
        assert "both or neither" in problems(arguments.PPOArguments, **values)[0]
    assert problems(arguments.PPOArguments, unsup_coef=1.0, unsupervised_dataset_name="texts.jsonl") == []
    frozen = problems(arguments.PPOArguments, algorithm="grpo", actor_freeze_steps=2)
    assert len(frozen) == 1 and "--actor_freeze_steps 2: --algorithm grpo has no critic" in frozen[0]
    assert problems(arguments.PPOArguments, actor_freeze_steps=2) == []
    for values in ({"algorithm": "rloo", "num_samples_per_prompt": 1}, {"dynamic_sampling": 1},
                   {"kl_target": 6.0, "kl_coef": 0.0}, {"ref_refresh_interval": 2, "kl_coef": 0.0}, {"dual_clip": 1.0},
                   {"rollout_correction": "mis", "rollout_correction_cap": 0.5}):  # fmt: skip
        assert len(problems(arguments.PPOArguments, **values)) == 1, values
    assert "constant_with_warmup" in problems(
        arguments.OptimizerArguments, lr_scheduler_type="constant", num_warmup_steps=3
    )[0]  # fmt: skip
    assert "--resume" in problems(arguments.RunArguments, output_dir=str(tmp_path), resume="yes")[0]


@pytest.mark.parametrize(
    ("values", "engine"),
    [
        ({}, "hybrid"),
        ({"enable_hybrid_engine": False}, "transformers"),
        ({"rollout_engine": "hybrid"}, "hybrid"),
        ({"rollout_engine": "transformers"}, "transformers"),
        ({"rollout_engine": "transformers", "enable_hybrid_engine": False}, "transformers"),
    ],
)
def test_the_rollout_engine_is_selected_by_name_or_by_enable_hybrid_engine(values, engine):
    assert arguments.RolloutArguments(**values).engine == engine


def test_correction_flags_without_effect_warn(tmp_path, capsys):
    argv = ["--actor_model_name_or_path", "a", "--reward_model_name_or_path", "r", "--data_path", "d"]
    argv += ["--output_dir", str(tmp_path)]

    def stderr_of(*more: str) -> str:
        parse(STEPS["ppo"], [*argv, *more], description="")
        return capsys.readouterr().err

    tis = "--rollout_correction", "tis"
    assert stderr_of(*tis, "--old_logprobs", "rollout") == (
        "warning: --rollout_correction tis has no effect without --old_logprobs recompute\n"
    )
    assert stderr_of("--rollout_correction_cap", "3") == (
        "warning: --rollout_correction_cap 3.0 has no effect without --rollout_correction tis or "
        "--rollout_correction mis or --rollout_correction seq_tis or --rollout_correction seq_mis\n"
    )
    text = stderr_of("--policy_loss", "sapo", "--clip_range", "0.1")
    assert text.startswith("warning: --clip_range 0.1 has no effect")
    assert stderr_of("--policy_loss", "gspo", "--clip_range", "0.1") == ""
    assert stderr_of(*tis, "--rollout_correction_cap", "3") == stderr_of("--old_logprobs", "rollout") == ""
    with pytest.raises(SettingsError, match="--rollout_correction_cap 0.0: must be above 0"):
        stderr_of(*tis, "--rollout_correction_cap", "0")


def test_adapter_flags_without_adapters_warn(tmp_path, capsys):
    argv = ["--model_name_or_path", "m", "--lora_learning_rate", "1e-3", "--tensorboard_path", "t"]
    argv += ["--data_path", "d", "--output_dir", str(tmp_path), "--report_to", "none"]
    parse(STEPS["sft"], argv, description="")
    stderr = capsys.readouterr().err
    assert "--lora_learning_rate 0.001 has no effect without --lora_dim\n" in stderr
    assert "--tensorboard_path t has no effect without --report_to tensorboard or --enable_tensorboard\n" in stderr
    parse(STEPS["sft"], [*argv, "--lora_dim", "2", "--enable_tensorboard"], description="")
    assert capsys.readouterr().err == ""
    with pytest.raises(SettingsError, match="--zero_stage 4: choose one of 0, 1, 2, 3"):
        parse(STEPS["sft"], [*argv, "--zero_stage", "4"], description="")
