"""Argument groups: flag names, compatible groups, and early rejection of invalid values."""

import dataclasses
import inspect
import json
from typing import get_args

import pytest

from dschat import arguments
from dschat.arguments.command_line import SettingsError, group_types, parse

GROUPS = [group for _, group in inspect.getmembers(arguments, dataclasses.is_dataclass) if hasattr(group, "problems")]
STEPS = {"sft": arguments.SFTSettings, "reward": arguments.RewardModelSettings, "ppo": arguments.RLHFSettings}

ONE_MODEL = """
    data_path data_split data_output_path model_name_or_path max_seq_len per_device_train_batch_size
    per_device_eval_batch_size learning_rate weight_decay num_train_epochs gradient_accumulation_steps lr_scheduler_type
    num_warmup_steps seed dtype zero_stage offload gradient_checkpointing lora_dim lora_module_name only_optimize_lora
    lora_learning_rate enable_tensorboard tensorboard_path output_dir eval_interval eval_iters dropout add_eot_token
    max_grad_norm adam_beta1 adam_beta2 deepspeed_config max_bad_rows
"""
RLHF = """
    data_path data_split data_output_path actor_model_name_or_path critic_model_name_or_path reward_model_name_or_path
    max_prompt_seq_len max_answer_seq_len per_device_generation_batch_size per_device_training_batch_size
    generation_batches ppo_epochs actor_learning_rate critic_learning_rate actor_weight_decay critic_weight_decay
    num_train_epochs gradient_accumulation_steps lr_scheduler_type num_warmup_steps seed dtype actor_zero_stage
    critic_zero_stage offload offload_reference_model offload_reward_model gradient_checkpointing actor_lora_dim
    critic_lora_dim lora_module_name only_optimize_lora lora_learning_rate enable_hybrid_engine enable_ema
    unsupervised_dataset_name unsup_coef enable_tensorboard tensorboard_path print_answers print_answers_interval
    output_dir eval_interval eval_iters actor_dropout critic_dropout add_eot_token kl_coef kl_estimator clip_range
    value_clip_range reward_clip gamma gae_lambda temperature top_p top_k missing_eos_penalty whiten_advantages
    max_grad_norm adam_beta1 adam_beta2 deepspeed_config max_bad_rows old_logprobs rollout_correction
    rollout_correction_cap rollout_engine generation_slots generation_memory_fraction pin_generation_buffers
"""


def names(settings: type) -> list[str]:
    return [field.name for group in group_types(settings).values() for field in dataclasses.fields(group)]


@pytest.mark.parametrize("step, known", [("sft", ONE_MODEL), ("reward", ONE_MODEL), ("ppo", RLHF)])
def test_a_step_has_every_flag_that_users_know_and_none_twice(step, known):
    flags = names(STEPS[step])
    assert not set(known.split()) - set(flags)
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_flag_has_help_a_default_within_its_bounds_and_needs_that_exist(group):
    from dschat.arguments.command_line import out_of_bounds

    assert out_of_bounds(group()) == []
    for field in dataclasses.fields(group):
        assert len(field.metadata["help"]) > 5
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


def test_values_that_cannot_work_are_refused_with_flag_value_and_way_out(tmp_path, monkeypatch):
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


def test_an_output_folder_that_cannot_be_written_is_refused_and_no_probe_is_left(tmp_path):
    file = tmp_path / "file"
    file.touch()
    (line,) = problems(arguments.RunArguments, output_dir=str(file / "run"))
    assert line.startswith(f"--output_dir {file}/run: cannot be written")
    assert problems(arguments.RunArguments, output_dir=str(tmp_path / "new" / "run")) == []
    assert not (tmp_path / "new").exists(), "other settings may be wrong: nothing is made before all are good"


def test_what_a_step_cannot_go_without_is_asked_for():
    assert "--data_path" in problems(arguments.DataArguments)[0]
    assert "--model_name_or_path" in problems(arguments.ModelArguments)[0]
    (actor,) = problems(arguments.RLHFModelArguments)
    assert "--actor_model_name_or_path" in actor
    assert problems(arguments.RLHFModelArguments, actor_model_name_or_path="a") == []


def test_flags_that_only_work_together(tmp_path):
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
def test_either_flag_chooses_the_rollout_engine(values, engine):
    assert arguments.RolloutArguments(**values).engine == engine


def test_a_correction_that_corrects_nothing_warns(tmp_path, capsys):
    argv = ["--actor_model_name_or_path", "a", "--reward_model_name_or_path", "r", "--data_path", "d"]
    argv += ["--output_dir", str(tmp_path)]

    def said(*more: str) -> str:
        parse(STEPS["ppo"], [*argv, *more], description="")
        return capsys.readouterr().err

    tis = "--rollout_correction", "tis"
    assert said(*tis, "--old_logprobs", "rollout") == (
        "warning: --rollout_correction tis has no effect without --old_logprobs recompute\n"
    )
    assert said("--rollout_correction_cap", "3") == (
        "warning: --rollout_correction_cap 3.0 has no effect without --rollout_correction tis or "
        "--rollout_correction mis or --rollout_correction seq_tis or --rollout_correction seq_mis\n"
    )
    assert said("--policy_loss", "sapo", "--clip_range", "0.1").startswith("warning: --clip_range 0.1 has no effect")
    assert said("--policy_loss", "gspo", "--clip_range", "0.1") == ""
    assert said(*tis, "--rollout_correction_cap", "3") == said("--old_logprobs", "rollout") == ""
    with pytest.raises(SettingsError, match="--rollout_correction_cap 0.0: must be above 0"):
        said(*tis, "--rollout_correction_cap", "0")


def test_adapters_settings_without_adapters_warn(tmp_path, capsys):
    argv = ["--model_name_or_path", "m", "--lora_learning_rate", "1e-3", "--tensorboard_path", "t"]
    argv += ["--data_path", "d", "--output_dir", str(tmp_path)]
    parse(STEPS["sft"], argv, description="")
    said = capsys.readouterr().err
    assert "--lora_learning_rate 0.001 has no effect without --lora_dim\n" in said
    assert "--tensorboard_path t has no effect without --enable_tensorboard\n" in said
    parse(STEPS["sft"], [*argv, "--lora_dim", "2", "--enable_tensorboard"], description="")
    assert capsys.readouterr().err == ""
    with pytest.raises(SettingsError, match="--zero_stage 4: choose one of 0, 1, 2, 3"):
        parse(STEPS["sft"], [*argv, "--zero_stage", "4"], description="")
