"""Fault injection on real runs (kills, signals, full disks, damage): no progress is lost, and errors are clear."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import MAINS
from safetensors.torch import load_file, save_file
from step_materials import flags, metrics_of, weights_of, write_materials

from dschat.checkpoints.disk_space import check_space
from dschat.checkpoints.selection import newest_checkpoint, verify_checkpoint
from dschat.runs.signals import SAVED

FOLDERS = {"sft": [""], "reward": [""], "dpo": [""], "ppo": ["", "critic"]}


@pytest.fixture(scope="module")
def materials(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("materials")
    write_materials(folder, tiny_tokenizer)
    return folder


@pytest.fixture(scope="module")
def whole(programs, materials, tmp_path_factory):
    """whole(step, …) returns the output folder of an unbroken run with these settings; each is run once."""
    runs: dict[str, Path] = {}

    def run(step: str, *, processes: int = 1, **settings) -> Path:
        name = repr((step, processes, sorted(settings.items())))
        if name not in runs:
            output = tmp_path_factory.mktemp("whole")
            argv = flags(step, materials, output, processes=processes, **settings)
            programs.run(MAINS[step], argv, processes=processes, log=output / "log.txt")
            runs[name] = output
        return runs[name]

    return run


@pytest.fixture
def run(programs, materials, tmp_path):
    """run(step, …) runs a step in one output folder, which later calls reuse; returns what it printed."""

    def once(step: str, *, processes: int = 1, code: int | None = 0, fail: str = "", **settings) -> str:
        argv = flags(step, materials, tmp_path / "run", processes=processes, **settings)
        log = tmp_path / f"log-{len(list(tmp_path.glob('log-*')))}"
        return programs.run(
            MAINS[step], argv, processes=processes, log=log, code=code, environment={"DSCHAT_FAILPOINT": fail}
        )

    return once


def assert_same_run(output: Path, unbroken: Path, step: str) -> None:
    """Metrics, samples and every exported weight, bit for bit."""
    assert metrics_of(output) == metrics_of(unbroken)
    for folder in FOLDERS[step]:
        actual, expected = weights_of(output / folder), weights_of(unbroken / folder)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected), folder
    if step == "ppo":
        assert (output / "samples.jsonl").read_text() == (unbroken / "samples.jsonl").read_text()


# Failpoints in a save, with their count: the second save writes the third and fourth file of DeepSpeed.
STAGES = {
    "begin": 2, "writing": 3, "one_written": 3, "model": 2, "written": 2, "digested": 2, "manifest": 2, "renamed": 2,
    "pointed": 2, "pruning": 1,
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_killed_at_any_stage_of_a_save_resumes_to_the_unbroken_result(stage, run, whole, tmp_path):
    settings = {"max_steps": 6, "save_interval": 2, "keep_checkpoints": 1}
    run("sft", **settings, fail=f"save_{stage}#{STAGES[stage]}", code=-signal.SIGKILL)
    assert newest_checkpoint(tmp_path / "run").name in ("step-00000002", "step-00000004")
    printed = run("sft", **settings, resume="auto")
    assert "resuming from" in printed and "damaged" not in printed
    assert_same_run(tmp_path / "run", whole("sft", **settings), "sft")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step-00000006"], "no files of the killed save are left"


def test_a_checkpoint_whose_replacement_was_killed_is_restored(run, whole, tmp_path):
    settings = {"max_steps": 4, "save_interval": 2, "keep_checkpoints": 2}
    run("sft", **settings)
    older, newer = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    run("sft", **settings, resume=older, fail="save_replacing#1", code=-signal.SIGKILL)
    assert not newer.exists(), "killed between the two renames"
    printed = run("sft", **settings, resume="auto")
    assert f"resuming from {newer}" in printed
    assert_same_run(tmp_path / "run", whole("sft", **settings), "sft")


@pytest.mark.parametrize("fail", ["save_one_written@1#3", "save_model@1#2", "save_written@1#2", "update@1#4"])
def test_a_killed_rank_ends_the_others_and_the_run_resumes_to_the_unbroken_result(fail, run, whole, tmp_path):
    settings = {"max_steps": 6, "save_interval": 2, "zero": 2, "processes": 2}
    run("sft", **settings, fail=fail, code=None)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    run("sft", **settings, resume="auto")
    assert_same_run(tmp_path / "run", whole("sft", **settings), "sft")


# (processes, ZeRO stage): every pair of a step, a number of processes and a stage is tested; the rest are slow tests.
LAYOUTS = {
    "sft": {(1, 2), (2, 0), (2, 3)}, "reward": {(1, 3), (2, 0), (2, 2)}, "dpo": {(1, 0), (2, 2), (2, 3)},
}  # fmt: skip


@pytest.mark.parametrize(
    "step, fail, settings",
    [
        *(
            pytest.param(
                step, f"update:TERM@{processes - 1}#2", {"zero": zero, "processes": processes},
                marks=[] if step == "ppo" or (processes, zero) in LAYOUTS[step] else pytest.mark.slow,
            )
            for step in ("sft", "reward", "dpo", "ppo")
            for processes in (1, 2)
            for zero in (0, 2, 3)
        ),
        ("sft", "update:USR1@1#2", {"zero": 2, "processes": 2, "dropout": 0.1}),
        ("sft", "update:INT#2", {"zero": 3, "processes": 2}),
        ("reward", "update:TERM#1", {"zero": 0}),
        ("dpo", "update:TERM#3", {"zero": 2, "preference_loss": "kto", "dropout": 0.1}),
        (
            "dpo",
            "update:USR1@1#2",
            {"zero": 3, "processes": 2, "lora_dim": 2, "only_optimize_lora": True, "reference": "adapters_off"},
        ),
        ("ppo", "rollout:TERM#4", {"zero": 0}),
        ("ppo", "update:TERM#2", {"zero": 2, "actor_dropout": 0.1, "enable_ema": True}),
        ("ppo", "scoring:USR1@1#4", {"zero": 3, "processes": 2, "actor_dropout": 0.1}),
        ("ppo", "update:TERM@1#3", {"zero": 2, "processes": 2, "old_logprobs": "rollout"}),
    ],
)
def test_a_signal_saves_at_the_next_update_and_the_resumed_run_equals_the_unbroken_one(
    step, fail, settings, run, whole, tmp_path
):
    printed = run(step, **settings, fail=fail, code=SAVED)
    assert "--resume auto continues it" in printed
    assert not (tmp_path / "run" / "model.safetensors").exists()
    if fail.startswith("update") and step == "ppo":
        assert "-update-" in newest_checkpoint(tmp_path / "run").name, "in the middle of an iteration"
    run(step, **settings, resume="auto")
    assert_same_run(tmp_path / "run", whole(step, **settings), step)


def test_signals_during_a_save_do_not_damage_it(run, whole, tmp_path):
    settings = {"max_steps": 4, "save_interval": 2}
    run("sft", **settings, fail="save_written:TERM,save_renamed:TERM,save_pointed:USR1", code=SAVED)
    newest = newest_checkpoint(tmp_path / "run")
    assert newest.name == "step-00000003" and verify_checkpoint(newest) == []
    assert verify_checkpoint(newest.with_name("step-00000002")) == []
    run("sft", **settings, resume="auto")
    assert_same_run(tmp_path / "run", whole("sft", **settings), "sft")


def test_the_second_ctrl_c_exits_at_once_and_the_earlier_checkpoint_stays_valid(run, tmp_path):
    printed = run("sft", max_steps=4, save_interval=2, fail="update:INT#3,save_written:INT#2", code=130)
    assert "a second Ctrl-C exits at once" in printed
    assert newest_checkpoint(tmp_path / "run").name == "step-00000002"
    assert verify_checkpoint(newest_checkpoint(tmp_path / "run")) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_whose_checkpoint_does_not_fit_on_the_disk_ends_the_run_with_one_message(processes, run, tmp_path):
    """Each save of rank 0 writes two files of the engine, so the fifth is the first one of the third save."""
    settings = {"max_steps": 6, "save_interval": 2, "zero": 2, "processes": processes}
    fail = f"update:TERM@{processes - 1}#5,save_writing:raise@0#5"
    output = run("sft", **settings, fail=fail, code=128 + signal.SIGTERM)
    newest = newest_checkpoint(tmp_path / "run")
    assert newest.name == "step-00000004" and verify_checkpoint(newest) == []
    assert "Traceback" not in output
    assert output.count("SIGTERM: the run ends at step 5 without saving it: the checkpoint cannot be written: ") == 1
    assert f"The last complete checkpoint is {newest}, 1 step earlier: make room, then --resume auto" in output
    assert {path.name for path in newest.parent.iterdir()} == {"latest", "step-00000002", "step-00000004"}


@pytest.mark.parametrize(
    "fail, settings",
    [
        ("export_weights:raise#1", {}),
        ("dump_inputs:raise@1", {"processes": 2, "zero": 3}),
        ("dump_update:raise@0", {"processes": 2, "zero": 3}),
    ],
)
def test_a_dump_that_does_not_fit_on_the_disk_is_removed_and_training_continues(fail, settings, run, tmp_path):
    output = run("ppo", max_steps=2, dump_step=1, **settings, fail=fail)
    assert "Traceback" not in output and output.count("The run continues without the dump") == 1
    trained = [line["step"] for line in metrics_of(tmp_path / "run") if line["phase"] == "train"]
    assert trained == [1, 2] and (tmp_path / "run" / "model.safetensors").exists()
    assert list((tmp_path / "run" / "dump").iterdir()) == []


@pytest.mark.parametrize("fail", ["save_writing:raise@1#1", "save_writing:raise@0#1"])
def test_a_checkpoint_that_cannot_be_written_is_a_warning_and_training_continues(fail, run, whole, tmp_path):
    settings = {"max_steps": 4, "save_interval": 2, "zero": 2, "processes": 2}
    printed = run("sft", **settings, fail=fail)
    assert "the checkpoint cannot be written: rank" in printed and "The run continues without it" in printed
    assert metrics_of(tmp_path / "run") == metrics_of(whole("sft", **settings))
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"latest", "step-00000004"}, "the failed attempt at step 2 leaves nothing"


def test_a_rank_that_cannot_write_still_joins_the_gathers_of_the_ema(run, tmp_path):
    """Under ZeRO-3 all ranks gather the average to be written: a rank whose write failed must take part."""
    settings = {"zero": 3, "processes": 2, "enable_ema": True, "save_interval": 1}
    printed = run("ppo", **settings, fail="save_writing:raise@1#1")
    assert "the checkpoint cannot be written: rank 1" in printed and "The run continues without it" in printed
    assert newest_checkpoint(tmp_path / "run").name == "step-00000002"


def test_metrics_that_cannot_be_written_are_dropped_and_training_is_unchanged(run, whole, tmp_path):
    printed = run("ppo", fail="log_metrics.jsonl:raise#4,log_samples.jsonl:raise#3")
    assert printed.count("warning: metrics.jsonl cannot be written") == 1
    assert printed.count("warning: samples.jsonl cannot be written") == 1
    actual, expected = metrics_of(tmp_path / "run"), metrics_of(whole("ppo"))
    assert len(expected) - len(actual) == 1 and all(line in expected for line in actual)
    for folder in FOLDERS["ppo"]:
        weights, expected_weights = weights_of(tmp_path / "run" / folder), weights_of(whole("ppo") / folder)
        assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)


@pytest.mark.parametrize(
    ("step", "fail"),
    [("sft", "export_begin:TERM@1,export_weights:INT@0"), ("ppo", "export_weights:TERM@0#2,export_written:USR1@0#1")],
)
def test_a_signal_during_the_export_waits_for_its_end(step, fail, run, whole, tmp_path):
    settings = {"zero": 3, "processes": 2}
    printed = run(step, **settings, fail=fail)
    assert "the model is exported first, then the run ends" in printed
    assert_same_run(tmp_path / "run", whole(step, **settings), step)
    assert not list((tmp_path / "run").rglob(".unfinished"))


def test_a_killed_export_leaves_no_model_and_a_resume_exports_it(run, whole, tmp_path):
    settings = {"max_steps": 4, "save_interval": 2}
    run("sft", **settings, fail="export_written", code=-signal.SIGKILL)
    assert not (tmp_path / "run" / "config.json").exists() and (tmp_path / "run" / ".unfinished").exists()
    run("sft", **settings, resume="auto")
    assert_same_run(tmp_path / "run", whole("sft", **settings), "sft")
    assert not (tmp_path / "run" / ".unfinished").exists()


def test_an_export_to_a_full_disk_ends_with_the_command_that_exports_later(run, whole, tmp_path):
    settings = {"max_steps": 4, "save_interval": 2, "processes": 2}
    printed = run("sft", **settings, fail="export_weights:raise", code=1)
    assert "Traceback" not in printed and printed.count("the model could not be written") == 1
    saved = newest_checkpoint(tmp_path / "run")
    assert f"The last checkpoint is {saved}. Make room" in printed and printed.rstrip().endswith("--resume auto")
    assert saved.name == "step-00000004" and verify_checkpoint(saved) == []
    assert not list((tmp_path / "run").glob("*.safetensors")) and not (tmp_path / "run" / "config.json").exists()
    run("sft", **settings, resume="auto")
    assert_same_run(tmp_path / "run", whole("sft", **settings), "sft")


def test_a_best_model_that_cannot_be_written_leaves_the_previous_one(run, tmp_path):
    settings = {"max_steps": 3, "best_metric": "eval_loss", "best_mode": "min", "eval_interval": 1}
    printed = run("sft", **settings, fail="export_weights:raise#2")
    assert "The previous best model is kept, and the run continues" in printed
    assert json.loads((tmp_path / "run" / "best" / "best.json").read_text())["step"] > 1, "a later best model is saved"
    assert not list((tmp_path / "run").glob("best.*")) and (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("fail", ["save_shadow_model:raise@0#1", "save_writing:raise@0#1"])
def test_a_write_that_fails_on_rank_0_leaves_no_rank_waiting_for_its_parts_of_other_models(fail, run, tmp_path):
    """Under ZeRO-3 the moving average and a refreshed reference are gathered while they are saved."""
    printed = run(
        "ppo", zero=3, processes=2, enable_ema=True, ref_refresh_interval=1, save_interval=1, max_steps=2, fail=fail
    )
    assert "the checkpoint cannot be written: rank 0" in printed and "The run continues without it" in printed
    assert newest_checkpoint(tmp_path / "run").name == "step-00000002"


def test_disk_space_is_checked_before_anything_is_written(tmp_path):
    with pytest.raises(OSError, match=r"takes about .* GB.*lower --keep_checkpoints"):
        check_space(tmp_path, 1 << 62)


def test_save_minutes_saves_between_updates(run, whole, tmp_path):
    printed = run("ppo", save_minutes=1e-9)
    assert "a checkpoint takes about" in printed and "saving has taken" in printed
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step-00000001-update-0003", "step-00000002"]
    assert metrics_of(tmp_path / "run") == metrics_of(whole("ppo"))


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_nan_gradient_on_one_rank_skips_the_update_on_all(zero, run, tmp_path):
    settings = {"zero": zero, "processes": 2, "lr_scheduler_type": "constant"}
    printed = run("sft", **settings, max_steps=3, fail="loss:nan@1#2")
    assert "warning: step 2: 1 of 1 updates skipped on all ranks" in printed
    lines = [line for line in metrics_of(tmp_path / "run") if line["phase"] == "train"]
    assert lines[1]["loss"] is None and lines[1]["skipped_updates"] == 1
    assert lines[2]["loss"] is not None
    weights = weights_of(tmp_path / "run")
    assert all(torch.isfinite(weight).all() for weight in weights.values())


def test_in_step_3_one_update_can_be_skipped_and_too_many_in_a_row_end_the_run(run, tmp_path):
    printed = run("ppo", zero=2, processes=2, fail="loss:nan@1#1")
    line = next(line for line in metrics_of(tmp_path / "run") if line["phase"] == "train")
    assert line["updates"] == 4 and line["skipped_updates"] == 1
    assert "1 of 4 updates skipped" in printed
    every = ",".join(f"loss:nan#{number}" for number in range(2, 20))
    printed = run("sft", max_steps=8, max_bad_steps=3, save_interval=1, fail=every, code=1)
    assert "3 updates in a row were skipped (--max_bad_steps): the last good checkpoint is" in printed


def test_a_solved_task_has_no_signal_and_the_run_ends_normally(run, tmp_path):
    (tmp_path / "solved.py").write_text("def solved(prompts, responses, rows): return [1.0] * len(prompts)")
    run(
        "ppo", algorithm="grpo", num_samples_per_prompt=2, dynamic_sampling=1, max_bad_steps=2,
        reward=f"{tmp_path / 'solved.py'}:solved", reward_model_name_or_path=None,
    )  # fmt: skip
    lines = [line for line in metrics_of(tmp_path / "run") if line["phase"] == "train"]
    assert len(lines) == 2 and all(line["updates_without_signal"] == line["updates"] > 2 for line in lines)
    assert all(line["skipped_updates"] == 0 for line in lines)
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_reaching_stop_at_kl_ends_the_run_with_an_export(run, tmp_path):
    printed = run("ppo", max_steps=6, stop_at_kl=1e-4, kl_estimator="k3")
    assert "has reached --stop_at_kl 0.0001: the run ends" in printed
    trained = [line["step"] for line in metrics_of(tmp_path / "run") if line["phase"] == "train"]
    assert trained[-1] < 6 and (tmp_path / "run" / "model.safetensors").exists()


def test_a_hanging_rank_is_reported_with_its_phase(programs, materials, tmp_path):
    # Long enough for a phase on a busy machine, so that the watchdog does not end the run.
    argv = flags("ppo", materials, tmp_path / "run", processes=2, collective_timeout=12)
    text = programs.run(
        MAINS["ppo"], argv, processes=2, log=tmp_path / "log", code=None,
        environment={"DSCHAT_FAILPOINT": "update:STOP@1#2"},
    )  # fmt: skip
    assert "rank 1 (" in text and "has sent no heartbeat for" in text and "in phase 'update'" in text
    assert "Rank 0 is in phase" in text and "train_rlhf" in text, "the stack of the waiting rank"


SLOW = """
import runpy, sys, time
from dschat.data import arrow
encode = arrow._encode
def slow(*arguments):
    time.sleep(0.4)
    return encode(*arguments)
arrow._encode = slow
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_data_preparation_may_take_longer_than_collective_timeout(programs, materials, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    argv = flags("sft", materials, tmp_path / "run", processes=2, collective_timeout=10, max_steps=1,
                 data_output_path=tmp_path / "arrow")  # fmt: skip
    programs.run(tmp_path / "slow.py", [MAINS["sft"], *argv], processes=2, log=tmp_path / "log")


def test_a_crash_under_the_launcher_leaves_no_process(materials, tmp_path):
    argv = flags("sft", materials, tmp_path / "run", processes=2)
    environment = os.environ | {"DSCHAT_FAILPOINT": "update:KILL@1#2", "DS_ACCELERATOR": "cpu"}
    command = [
        Path(sys.executable).with_name("deepspeed"), "--num_accelerators", "2", "--master_port", "29641",
        MAINS["sft"], *argv,
    ]  # fmt: skip
    started = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        assert started.wait(timeout=120) != 0
        left = subprocess.run(["pgrep", "-g", str(started.pid)], capture_output=True, text=True).stdout
        assert not left.split(), "processes of the run are still there"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


def test_changed_flags_are_reported_or_refused(run, tmp_path):
    run("sft", max_steps=3, fail="update:TERM#1", code=SAVED)
    printed = run("sft", max_steps=3, seed=99, resume="auto", code=2)
    assert "belongs to another run: --seed was 1234, is 99" in printed and "--resume_anyway" in printed
    printed = run("sft", max_steps=4, learning_rate=1e-3, resume="auto", fail="update:TERM#1", code=SAVED)
    assert "changed since: " in printed and "--max_steps was 3, is 4" in printed and "--learning_rate" in printed
    rates = {line["step"]: line["learning_rate"] for line in metrics_of(tmp_path / "run") if line["phase"] == "train"}
    assert rates[2] == pytest.approx(1e-3 * (1 + math.cos(math.pi * 1 / 4)) / 2), "a cosine over the new 4 steps"
    manifest = json.loads((newest_checkpoint(tmp_path / "run") / "manifest.json").read_text())
    assert manifest["arguments"]["max_steps"] == 4 and "torch" in manifest["versions"]


def test_changed_data_is_refused(run, materials, tmp_path):
    run("sft", max_steps=3, fail="update:TERM#1", code=SAVED)
    rows = (materials / "sft.jsonl").read_text()
    try:
        (materials / "sft.jsonl").write_text(rows.replace("very", "quite"))
        assert rows != (materials / "sft.jsonl").read_text()
        printed = run("sft", max_steps=3, resume="auto", code=2)
        assert "content was" in printed and "belongs to another run" in printed
    finally:
        (materials / "sft.jsonl").write_text(rows)


def test_a_dumped_update_can_be_replayed_and_a_changed_number_is_detected(run, tmp_path):
    run("ppo", max_steps=2, dump_step=2, processes=2, zero=2)
    folder = tmp_path / "run" / "dump" / "step-00000002"
    replay = [sys.executable, MAINS["ppo"].parents[2] / "scripts" / "replay.py", folder]
    replayed = subprocess.run(replay, capture_output=True, text=True)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "the replay equals the run" in replayed.stdout and "rank 1 logprobs" in replayed.stdout
    file = folder / "update_rank1.safetensors"
    tensors = load_file(file)
    tensors["values"][1, 2] += 0.5
    save_file(tensors, file)
    replayed = subprocess.run(replay, capture_output=True, text=True)
    assert replayed.returncode == 1
    differing = [line for line in replayed.stdout.splitlines() if "<- differs" in line]
    assert len(differing) == 1 and differing[0].startswith("rank 1 values") and "(1, 2)" in differing[0]


def test_a_second_run_in_the_same_folder_is_refused(run, tmp_path):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 7 on elsewhere")
        file.flush()
        printed = run("sft", processes=2, code=2)
    assert "another run is writing there (process 7 on elsewhere)" in printed and "Traceback" not in printed
    run("sft", max_steps=1)


def test_a_new_run_moves_the_earlier_checkpoints_aside(run, tmp_path):
    run("sft", max_steps=2, save_interval=1)
    printed = run("sft", max_steps=2, save_interval=2, fail="update#1", code=-signal.SIGKILL)
    assert "checkpoints-before-1" in printed
    printed = run("sft", max_steps=2, resume="auto")
    assert "resuming from" not in printed, "the older run's checkpoints are not this run's"


BAD_WEIGHTS = {
    "cut short": (lambda folder: os.truncate(folder / "model.safetensors", 5000), "is damaged or cut short"),
    "a missing shard": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}})
        ),
        "lacks model-00001-of-00002.safetensors",
    ),
    "no index": (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "cannot be read"),
    "code": (lambda folder: put_code(folder), "would run"),
    "code in a shard": (lambda folder: put_code(folder, "weights.pkl"), "would run"),
    "a shard elsewhere": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {"a": "../model.safetensors"}})
        ),
        "names files outside its folder",
    ),
}


class Runs:
    """Unpickling it touches a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def put_code(folder: Path, name: str = "pytorch_model.bin") -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Runs(folder / "was_run")}, folder / name)
    if name != "pytorch_model.bin":
        index = {"metadata": {}, "weight_map": {"weight": name}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("damage, message", BAD_WEIGHTS.values(), ids=BAD_WEIGHTS.keys())
def test_bad_weights_are_reported_before_they_are_loaded(damage, message, run, materials, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(materials / "actor", model)
    damage(model)
    printed = run("sft", model_name_or_path=model, code=2)
    assert f"--model_name_or_path {model}: " in printed and message in printed and "Traceback" not in printed
    assert not (model / "was_run").exists()


def test_code_in_a_checkpoint_is_refused_and_not_run(run, tmp_path):
    """One where the manifest has the changed file's checksum, one where the manifest does not list it any more."""
    run("sft", max_steps=3, save_interval=1, keep_checkpoints=3, zero=2)
    _, second, third = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    for folder, listed in ((second, False), (third, True)):
        (file,) = folder.glob("model/*optim_states.pt")
        torch.save({"optimizer_state_dict": Runs(tmp_path / "was_run")}, file)
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["files"][file.relative_to(folder).as_posix()]
        if listed:
            manifest["files"][file.relative_to(folder).as_posix()] = (
                file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()
            )  # fmt: skip
        (folder / "manifest.json").write_text(json.dumps(manifest))
    printed = run("sft", max_steps=4, zero=2, resume="auto")
    assert "would run posix.system" in printed and "optim_states.pt is not in the manifest" in printed
    assert "resuming from" in printed and "step-00000001" in printed
    assert not (tmp_path / "was_run").exists()


def test_an_output_folder_that_cannot_be_written_is_named(run, tmp_path):
    (tmp_path / "run").write_text("a file")
    printed = run("sft", code=2)
    assert "cannot be written" in printed and "name another folder" in printed


@pytest.mark.parametrize(
    "zero, dtype, relative", [(0, "fp32", 1e-4), (2, "fp32", 1e-4), (3, "fp32", 1e-4), (2, "bf16", 1e-3)]
)
def test_a_run_resumed_with_other_world_sizes_has_the_same_data_and_nearly_the_same_losses(
    zero, dtype, relative, run, whole, tmp_path
):
    settings = {"zero": zero, "max_steps": 6, "dtype": dtype}
    run("sft", **settings, processes=2, save_interval=2, fail="update:TERM#2", code=SAVED)
    printed = run("sft", **settings, processes=1, save_interval=2, resume="auto", fail="update:TERM#2", code=SAVED)
    assert "--per_device_train_batch_size was 4, is 8" in printed
    run("sft", **settings, processes=2, resume="auto")
    expected = metrics_of(whole("sft", **settings, processes=2))
    actual = metrics_of(tmp_path / "run")
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    for line, expected_line in zip(actual, expected, strict=True):
        name = "loss" if expected_line["phase"] == "train" else "eval_loss"
        assert line[name] == pytest.approx(expected_line[name], rel=relative)
        assert line.get("learning_rate") == expected_line.get("learning_rate")


@pytest.mark.parametrize("saved_stage, stage", [(2, 1), (1, 2)])
@pytest.mark.parametrize("dtype, processes", [("fp32", 1), ("bf16", 2)])
def test_zero_1_and_2_resume_each_other(dtype, processes, saved_stage, stage, run, whole, tmp_path):
    """DeepSpeed has other optimizers for stage 1 and 2 in bf16; the loss is that of the unbroken run."""
    settings = {"max_steps": 4, "dtype": dtype, "processes": processes}
    run("sft", zero=saved_stage, **settings, fail="update:TERM#2", code=SAVED)
    run("sft", zero=stage, **settings, resume="auto")
    unbroken = whole("sft", zero=saved_stage, **settings)
    if dtype == "fp32":
        assert_same_run(tmp_path / "run", unbroken, "sft")
    pairs = zip(metrics_of(tmp_path / "run"), metrics_of(unbroken), strict=True)
    assert all(ours.get("loss", 0) == pytest.approx(theirs.get("loss", 0), rel=1e-3) for ours, theirs in pairs)


@pytest.mark.parametrize("saved_stage, stage", [(0, 2), (3, 2), (2, 3)])
def test_a_resume_with_another_zero_stage_is_refused_and_names_the_right_one(saved_stage, stage, run, tmp_path):
    run("sft", zero=saved_stage, fail="update:TERM#2", code=SAVED)
    printed = run("sft", zero=stage, resume="auto", code=2)
    names = {2: "1 or 2"}
    saved_name, name = (names.get(number, number) for number in (saved_stage, stage))
    assert f"contains the model of ZeRO stage {saved_name}, but this run has stage {name}" in printed
    assert f"resume with stage {saved_name}" in printed


def test_step_3_resumes_with_another_world_size_only_between_iterations(run, tmp_path):
    run("ppo", max_steps=3, processes=2, save_interval=1, fail="update:TERM@1#6", code=SAVED)
    assert "-update-" in newest_checkpoint(tmp_path / "run").name
    printed = run("ppo", max_steps=3, processes=1, resume="auto")
    assert "in the middle of an iteration" in printed and "resuming from" in printed
    trained = [line["step"] for line in metrics_of(tmp_path / "run") if line["phase"] == "train"]
    assert trained == [1, 2, 3]


def test_a_full_file_system_costs_a_checkpoint_and_no_training(run, whole, tmp_path):
    """A real full file system, where the machine allows mounting one."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        settings = {"max_steps": 4, "save_interval": 2, "zero": 2}
        printed = run("sft", **settings)  # one checkpoint fits, a second beside it does not
        assert "The run continues without it" in printed
        (saved,) = folder.glob("step-*")
        assert saved.name == "step-00000002" and verify_checkpoint(saved) == []
        assert metrics_of(tmp_path / "run") == metrics_of(whole("sft", **settings))
    finally:
        subprocess.run(["umount", folder], check=True)


def test_on_a_full_file_system_the_export_fails_with_one_message_and_a_valid_checkpoint(run, whole, tmp_path):
    """The whole output folder on a real full file system, where the machine allows mounting one."""
    folder = tmp_path / "run"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=710k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        settings = {"max_steps": 4, "save_interval": 2, "keep_checkpoints": 1, "zero": 2}
        printed = run("sft", **settings, code=1)
        (saved,) = (folder / "checkpoints").glob("step-*")
        assert verify_checkpoint(saved) == [] and f"The last checkpoint is {saved}. Make room" in printed
        assert "Traceback" not in printed and not (folder / "config.json").exists()
        assert not list(folder.rglob(".unfinished"))
        subprocess.run(["mount", "-o", "remount,size=4m", folder], check=True)
        run("sft", **settings, resume="auto")
        assert_same_run(folder, whole("sft", **settings), "sft")
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_nan_score_skips_the_updates_that_use_it(run, tmp_path):
    printed = run("ppo", max_steps=2, processes=2, zero=2, fail="scores:nan@1#3")  # two evaluations' batches come first
    lines = [line for line in metrics_of(tmp_path / "run") if line["phase"] == "train"]
    assert sum(line["skipped_updates"] for line in lines) >= 4 and "updates skipped on all ranks" in printed
    for folder in FOLDERS["ppo"]:
        assert all(torch.isfinite(weight).all() for weight in weights_of(tmp_path / "run" / folder).values())


def test_unequal_numbers_of_micro_batches_are_an_error_on_every_rank(programs, tmp_path):
    script = tmp_path / "unequal.py"
    script.write_text(UNEQUAL)
    printed = programs.run(script, [], processes=2, log=tmp_path / "log", code=1)
    assert printed.count("RuntimeError: one rank has 2 micro-batches for this optimizer step and another 3") == 2


UNEQUAL = """
import deepspeed, torch
from dschat.distributed import collectives
from dschat.distributed import launch
from dschat.distributed.engines import optimizer_step
launch.join(seed=1)
model = torch.nn.Linear(4, 1)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config, dist_init_required=False
)
optimizer_step(engine, [lambda: (engine(torch.ones(1, 4)).sum(), {})] * (2 + collectives.rank()))
"""


def test_code_in_a_file_replaced_after_verification_is_not_run(programs, tmp_path):
    """The check reads a file once, DeepSpeed reads it again: loading is restricted by itself."""
    script = tmp_path / "exchange.py"
    script.write_text(EXCHANGE)
    printed = programs.run(script, [tmp_path], log=tmp_path / "log")
    assert "step-00000001 is refused: it would run posix.mkdir when it is loaded" in printed
    assert not (tmp_path / "was_run").exists()


EXCHANGE = """
import os, sys
from pathlib import Path
import torch
from dschat.checkpoints.disk_space import check_space
from dschat.checkpoints.loading import load_checkpoint
from dschat.checkpoints.saving import save_checkpoint
from dschat.checkpoints.selection import find_checkpoint, newest_checkpoint, verify_checkpoint
from dschat.distributed import launch
from dschat.distributed.deepspeed_config import frozen_config
from dschat.distributed.engines import frozen_engine
launch.join(seed=1)
config = frozen_config(dtype="fp32", zero_stage=0, micro_batch_size=1, world_size=1)
engines = {"model": frozen_engine(torch.nn.Linear(2, 2), config=config)}
folder = save_checkpoint(sys.argv[1], 1, engines=engines, state={}, keep=1)
assert find_checkpoint(sys.argv[1], "auto") == folder
load_checkpoint(folder, engines=engines, fingerprint={})

class Runs:
    def __reduce__(self):
        return os.mkdir, (str(Path(sys.argv[1], "was_run")),)

(file,) = (folder / "model").glob("*model_states.pt")
torch.save({"module": Runs()}, file)
try:
    load_checkpoint(folder, engines=engines, fingerprint={})
except ValueError as error:
    print(error)
"""
