"""Command lines of DeepSpeed-Chat parse, and habits from TRL, OpenRLHF and verl are answered with our flags."""

import json
import shlex
from pathlib import Path

import pytest

from dschat import arguments
from dschat.arguments.command_line import SettingsError, SuiteParser, group_types, parse
from dschat.arguments.other_suites import DEEPSPEED_CHAT, HABITS, ours_for, translate

# Flags of the shell scripts in the training folders of DeepSpeedExamples' DeepSpeed-Chat, variables filled in.
SCRIPTS = json.loads((Path(__file__).parent / "data" / "deepspeed_chat_flags.json").read_text())
SETTINGS = {
    "sft": arguments.SFTSettings, "reward": arguments.RewardModelSettings, "ppo": arguments.RLHFSettings,
}  # fmt: skip


def flags_of(step):
    return SuiteParser(tuple(group_types(SETTINGS[step]).values())).flags()


@pytest.mark.parametrize("step, script", [(step, script) for step in SCRIPTS for script in SCRIPTS[step]])
def test_the_flags_of_deepspeed_chats_scripts_parse(step, script):
    line = SCRIPTS[step][script]
    try:
        settings = parse(SETTINGS[step], shlex.split(line), description="")
    except SettingsError as error:
        _, *mistakes = str(error).split("\n  - ")
        assert "--data_path" not in line and all("--data_path" in mistake for mistake in mistakes), mistakes
        return
    if "gradient_checkpointing" in line:
        assert settings.devices.gradient_checkpointing
    if "disable_actor_dropout" in line:
        assert settings.models.actor_dropout == 0
    if "lora_module_name decoder" in line:
        assert settings.lora.lora_module_name == "decoder.layers."
    if "per_device_mini_train_batch_size" in line:
        assert settings.ppo.per_device_training_batch_size == settings.rollouts.per_device_generation_batch_size == 4


def test_flags_without_effect_are_warned_of_with_the_reason(capsys):
    parse(SETTINGS["ppo"], shlex.split(SCRIPTS["ppo"]["opt/multi_node/run_66b.sh"]), description="")
    error = capsys.readouterr().err
    for name in ("deepspeed", "num_padding_at_beginning", "inference_tp_size", "tp_gather_partition_size"):
        assert f"warning: --{name} has no effect here: {DEEPSPEED_CHAT[name].reason}" in error
    assert "--actor_gradient_checkpointing" not in error  # has the effect of ours


def test_two_flags_that_are_one_here_must_agree():
    flags = flags_of("ppo")
    same = translate(["--actor_lora_module_name", "q", "--critic_lora_module_name=q"], flags)
    assert same == (["--lora_module_name", "q"], [], [])
    _, _, (mistake,) = translate(["--actor_lora_module_name", "q", "--critic_lora_module_name", "v"], flags)
    assert "--actor_lora_module_name and --critic_lora_module_name differ" in mistake
    _, _, (mistake,) = translate(["--inference_tp_size", "--deepspeed"], flags)
    assert mistake == "--inference_tp_size: expects a value"


def test_flags_that_a_step_has_are_never_translated():
    line = ["--per_device_train_batch_size", "4", "--dropout", "0.1"]
    assert translate(line, flags_of("sft")) == (line, [], [])


HABIT_CASES = {
    "sft": {"lr": "learning_rate", "model": "model_name_or_path", "dataset": "data_path", "max_length": "max_seq_len",
            "lora_r": "lora_dim", "use_wandb": "report_to", "bf16": "dtype"},
    "ppo": {"lr": "actor_learning_rate", "model": "actor_model_name_or_path", "num_generations":
            "num_samples_per_prompt", "beta": "kl_coef", "max_completion_length": "max_answer_seq_len",
            "reward_funcs": "reward", "remote_rm_url": "reward", "eps_clip": "clip_range", "use_vllm":
            "rollout_engine", "lam": "gae_lambda", "init_kl_coef": "kl_coef"},
}  # fmt: skip


@pytest.mark.parametrize(
    "step, theirs, ours", [(step, *pair) for step, names in HABIT_CASES.items() for pair in names.items()]
)
def test_habits_get_did_you_mean(step, theirs, ours):
    with pytest.raises(SettingsError, match=f"--{theirs} is not a flag of this step: did you mean --{ours}\\?"):
        parse(SETTINGS[step], [f"--{theirs}", "1"], description="")


def test_every_flag_of_the_tables_exists_in_a_step():
    flags = set().union(*map(flags_of, SETTINGS), SuiteParser((arguments.PreferenceArguments,)).flags())
    unknown = {ours for candidates in HABITS.values() for ours in candidates} - flags
    unknown |= {spelling.ours[0][2:] for spelling in DEEPSPEED_CHAT.values() if spelling.ours} - flags
    assert not unknown
    assert ours_for("nothing", flags) is None
