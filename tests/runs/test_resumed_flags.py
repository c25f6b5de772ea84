"""Flags changed between a run and its resumption take effect or are rejected; none is ignored."""

from dataclasses import fields
from pathlib import Path

import pytest
from rlhf_models import QUESTIONS, eval_rows, make_trainer, save_models

from dschat import arguments
from dschat.arguments.command_line import SettingsError
from dschat.checkpoints.loading import load_checkpoint
from dschat.checkpoints.selection import newest_checkpoint
from dschat.data.batches import GlobalBatches
from dschat.data.datasets import DataSplits
from dschat.rlhf.experience import MinibatchShuffle, MiniDataset
from dschat.rlhf.training_loop import PPORun
from dschat.runs import signals
from dschat.runs.health import Health, TooManyBadSteps
from dschat.runs.run_log import RunLog

GROUPS = (
    arguments.ModelArguments, arguments.SupervisedArguments, arguments.RewardModelArguments,
    arguments.PreferenceArguments, arguments.RLHFModelArguments, arguments.RolloutArguments, arguments.PPOArguments,
    arguments.RewardArguments, arguments.EvaluationArguments, arguments.DataArguments, arguments.OptimizerArguments,
    arguments.LoraArguments, arguments.DeviceArguments, arguments.RunArguments,
)  # fmt: skip

# A checkpoint restores these with the optimizer and its schedule; test_optimizer_settings: the flags override them.
OPTIMIZER_FLAGS = """
    learning_rate actor_learning_rate critic_learning_rate lora_learning_rate weight_decay actor_weight_decay
    critic_weight_decay adam_beta1 adam_beta2 max_grad_norm max_steps num_train_epochs actor_freeze_steps
"""
# Saved state depends on them: tested below; values that are refused, in test_faults and test_validation.
STATE_FLAGS = """
    kl_coef kl_target best_metric best_mode max_bad_steps temperature per_device_train_batch_size
    per_device_generation_batch_size per_device_training_batch_size gradient_accumulation_steps zero_stage
    actor_zero_stage critic_zero_stage enable_ema ref_refresh_interval max_bad_rows data_output_path
"""


def test_flags_that_checkpoints_depend_on_take_effect_when_they_change():
    declared = {field.name: field.metadata["on_resume"] for group in GROUPS for field in fields(group)}
    assert {declared[name] for name in (OPTIMIZER_FLAGS + STATE_FLAGS).split()} == {"apply"}


pytestmark = pytest.mark.usefixtures("single_rank_group")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def make_run(models: Path, output: Path, *, minibatch_size: int = 4, run: dict | None = None, **changes) -> PPORun:
    trainer = make_trainer(models, **{"algorithm": "reinforce++", "kl_coef": 0.2} | changes)
    dataset = MiniDataset(
        MinibatchShuffle(minibatch_size=minibatch_size, rank=0, world_size=1, seed=5), generation_batches=1,
        ppo_epochs=1, whiten_advantages=False,
    )  # fmt: skip
    rows = eval_rows(trainer, QUESTIONS)
    settings = arguments.RunArguments(output_dir=str(output), save_interval=1, **(run or {}))
    return PPORun(
        trainer=trainer, dataset=dataset, prompts=DataSplits(train=rows, eval=rows.select(range(2)), report=None),
        batches=GlobalBatches([1] * len(QUESTIONS), global_batch_size=4, seed=3, group_by_length=False),
        unsupervised=None, iterations=1, updates_per_iteration=4 // minibatch_size,
        settings=arguments.RLHFSettings(ppo=trainer.ppo, rollouts=trainer.rollouts, run=settings),
    )  # fmt: skip


def fit(run: PPORun, resumed: Path | None) -> PPORun:
    Path(run.settings.run.output_dir).mkdir(exist_ok=True)
    with signals.capture_signals() as signal_flag:
        run.fit(resumed, signal_flag)
    return run


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory) -> Path:
    """The checkpoint of a finished run of one iteration; a run that resumes it has nothing left to do."""
    output = tmp_path_factory.mktemp("finished")
    fit(make_run(models, output), None)
    return newest_checkpoint(output)


@pytest.fixture(scope="module")
def adapted(models, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("adapted")
    run = fit(make_run(models, output, kl_target=1.0, kl_horizon=4.0), None)
    assert run.trainer.kl_coef == pytest.approx(0.2 * 0.8), "far below its target: lowered by the largest factor"
    return newest_checkpoint(output)


def test_a_checkpoint_restores_accumulated_state_and_no_flags(finished):
    """When adding an entry, decide what a change of the flags behind it does."""
    state = load_checkpoint(finished, engines={}, fingerprint={})
    identity = {"rows", "global_batch_size", "seed", "content", "shadow_models", "sequences_per_update"}
    positions = {"step", "update", "prompts_consumed", "iterations_without_scores"}
    assert state.keys() == identity | positions | {"kl_coef", "temperature", "rewards", "health", "best"}


def test_kl_coef_of_the_flag_replaces_the_saved_one(models, finished, tmp_path, capsys):
    assert fit(make_run(models, tmp_path, kl_coef=0.05), finished).trainer.kl_coef == 0.05
    printed = capsys.readouterr().out
    assert "--kl_coef was 0.2, is 0.05" in printed and "no effect" not in printed


def test_an_adapted_kl_coef_is_restored_and_a_changed_flag_is_reported_as_without_effect(
    models, adapted, tmp_path, capsys
):
    target = {"kl_target": 1.0, "kl_horizon": 4.0}
    assert fit(make_run(models, tmp_path / "same", **target), adapted).trainer.kl_coef == pytest.approx(0.16)
    assert "--kl_coef" not in capsys.readouterr().out
    assert fit(make_run(models, tmp_path / "changed", kl_coef=0.5, **target), adapted).trainer.kl_coef == pytest.approx(
        0.16
    )
    printed = capsys.readouterr().out
    assert "--kl_coef was 0.2, is 0.5" in printed
    assert "--kl_coef has no effect: --kl_target continues from 0.16" in printed
    without_target = fit(make_run(models, tmp_path / "off", kl_coef=0.5), adapted)
    assert without_target.trainer.kl_coef == 0.5, "nothing adapts it: the flag applies"


def test_updates_of_another_size_are_refused(models, finished, tmp_path):
    with pytest.raises(SettingsError, match="sequences_per_update was 4 and is 2"):
        fit(make_run(models, tmp_path, minibatch_size=2), finished)


def test_a_changed_temperature_applies_from_the_next_rollout_not_within_an_iteration(models, finished, tmp_path):
    run = fit(make_run(models, tmp_path, temperature=0.5), finished)
    assert run.trainer.rollouts.temperature == 0.5
    state = load_checkpoint(finished, engines={}, fingerprint={})
    with pytest.raises(ValueError, match="--temperature was 0.7 and is 0.5, but .* in the middle of an iteration"):
        run.load_state(state | {"update": 1}, [])
    make_run(models, tmp_path).load_state(state | {"update": 1}, [])


def test_a_changed_best_metric_starts_a_new_comparison_and_is_validated_at_once(models, tmp_path):
    fit(make_run(models, tmp_path, run={"best_metric": "response_length"}), None)
    resumed, best = newest_checkpoint(tmp_path), tmp_path / "best" / "best.json"
    before = best.read_text()
    assert "response_length" in before
    fit(make_run(models, tmp_path, run={"best_metric": "response_length"}), resumed)
    assert best.read_text() == before, "the same metric: the best value is kept"
    fit(make_run(models, tmp_path, run={"best_metric": "entropy", "best_mode": "min"}), resumed)
    assert '"step": 1, "entropy"' in best.read_text()
    with pytest.raises(SettingsError, match="--best_metric accuracy: the evaluation has no such metric; it has"):
        fit(make_run(models, tmp_path, run={"best_metric": "accuracy"}), resumed)


def test_a_lowered_max_bad_steps_counts_the_bad_steps_before_the_resume_too(tmp_path):
    settings = arguments.RunArguments(output_dir=str(tmp_path), max_bad_steps=3)
    log = RunLog(str(tmp_path), name="x", arguments={}, total_steps=9)
    health = Health(settings, log, {"skipped_in_a_row": 5, "moments": {}})
    with pytest.raises(TooManyBadSteps):
        health.check_metrics(7, {}, skipped=[True])
    unlimited = Health(arguments.RunArguments(max_bad_steps=0), log, {"skipped_in_a_row": 5, "moments": {}})
    unlimited.check_metrics(7, {}, skipped=[True])
