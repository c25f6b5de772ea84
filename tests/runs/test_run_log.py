"""metrics.jsonl, samples.jsonl, run.json, TensorBoard: complete, readable, no duplicate lines after a resume."""

import json
import math
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from disk_limits import limit_file_size
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dschat.distributed import failpoint
from dschat.runs.run_log import RunLog


@dataclass
class Settings:
    colour: str = "blue"
    depth: int = 3


def log_of(folder: Path, **options) -> RunLog:
    return RunLog(str(folder), name="paint", arguments=asdict(Settings()), total_steps=10, **options)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_every_call_appends_a_line_and_the_console_shows_progress(tmp_path, capsys):
    log = log_of(tmp_path)
    log.metrics(0, {"loss": 4.0}, phase="eval")
    log.metrics(1, {"loss": 3.0, "accuracy": 0.25})
    log.metrics(10, {"loss": 2.0})
    records = lines(tmp_path / "metrics.jsonl")
    assert [(line["phase"], line["step"], line["loss"]) for line in records] == [
        ("eval", 0, 4.0), ("train", 1, 3.0), ("train", 10, 2.0)]  # fmt: skip
    assert records[1]["accuracy"] == 0.25
    assert 0 <= records[0]["time"] <= records[1]["time"] <= records[2]["time"] < 60
    eval_line, first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("[paint] train 1/10  loss 3  accuracy 0.25  ETA") and "ETA" in first
    assert "ETA" not in last and "ETA" not in eval_line


def test_numbers_that_are_not_finite_are_written_as_null(tmp_path):
    log_of(tmp_path).metrics(1, {"a": math.nan, "b": -math.inf, "c": 0.5})
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["a"], line["b"], line["c"]) == (None, None, 0.5)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_resumed_run_drops_the_lines_after_its_checkpoint(tmp_path):
    log = log_of(tmp_path)
    for step in range(1, 6):
        log.metrics(step, {"loss": float(step)})
        log.samples(step, [{"prompt": "p", "response": f"first {step}", "score": 0.0}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "time": 1.0, "los')  # killed while it wrote
    resumed = log_of(tmp_path, finished_steps=3)
    resumed.metrics(4, {"loss": 40.0})
    resumed.samples(4, [{"prompt": "p", "response": "second 4", "score": 0.0}])
    assert [(line["step"], line["loss"]) for line in lines(tmp_path / "metrics.jsonl")] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]  # fmt: skip
    assert [sample["response"] for sample in lines(tmp_path / "samples.jsonl")] == [
        "first 1", "first 2", "first 3", "second 4"]  # fmt: skip


def test_a_new_run_drops_the_lines_of_an_older_one(tmp_path):
    log_of(tmp_path).metrics(0, {"loss": 1.0}, phase="eval")
    log_of(tmp_path).metrics(0, {"loss": 2.0}, phase="eval")
    assert [line["loss"] for line in lines(tmp_path / "metrics.jsonl")] == [2.0]


def test_run_json_holds_arguments_versions_and_devices(tmp_path):
    log_of(tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["name"] == "paint" and run["arguments"] == {"colour": "blue", "depth": 3}
    assert {"python", "torch", "deepspeed", "transformers"} <= run["versions"].keys()
    assert run["devices"]["processes"] == 1


def test_samples_keep_non_ascii_text(tmp_path):
    log_of(tmp_path).samples(2, [{"prompt": "Wieviel?", "response": "fünf 五\n", "score": 1.5}], phase="eval")
    assert lines(tmp_path / "samples.jsonl") == [
        {"step": 2, "phase": "eval", "prompt": "Wieviel?", "response": "fünf 五\n", "score": 1.5}
    ]
    assert "五" in (tmp_path / "samples.jsonl").read_text(encoding="utf-8")


def test_tensorboard_has_a_curve_for_every_metric_and_phase(tmp_path):
    log = log_of(tmp_path, report_to=["tensorboard"], tensorboard=str(tmp_path / "events"))
    log.metrics(1, {"loss": 3.0})
    log.metrics(2, {"loss": 2.5})
    log.metrics(2, {"loss": 2.75}, phase="eval")
    log.close()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(1, 3.0), (2, 2.5)]
    assert [(point.step, point.value) for point in events.Scalars("eval/loss")] == [(2, 2.75)]


def test_tensorboard_shows_hyper_parameters_and_samples_as_plain_text(tmp_path):
    log = log_of(tmp_path, report_to=["tensorboard"])
    log.samples(3, [{"prompt": "<b>2 + 2</b>", "response": "# 4", "score": 1.0}])
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = (event.tensor_proto.string_val[0].decode() for event in events.Tensors("train/samples/text_summary"))
    assert "    <b>2 + 2</b>" in text and "    # 4" in text and "score 1.0" in text, "indented: shown as it is"
    (parameters,) = (tmp_path / "tensorboard").glob("*/hparams.yml")
    assert "colour: blue" in parameters.read_text()


def test_run_json_has_each_process_with_command_duration_and_outcome(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["main.py", "--reward", "http://host/score?api_key=SECRET"])
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "SECRET")
    log_of(tmp_path)  # killed
    log_of(tmp_path, finished_steps=3).close("ended by ExitAfterSave: 75")
    log_of(tmp_path, finished_steps=5).close()
    text = (tmp_path / "run.json").read_text()
    run = json.loads(text)
    assert [session.get("outcome") for session in run["sessions"]] == [None, "ended by ExitAfterSave: 75", "finished"]
    assert [session["first_step"] for session in run["sessions"]] == [0, 3, 5]
    assert all(0 <= session["seconds"] < 60 for session in run["sessions"][1:])
    assert run["command"].startswith("main.py --reward") and run["environment"]["NCCL_DEBUG"] == "INFO"
    assert run["git"] is None or len(run["git"]["commit"]) == 40
    assert "SECRET" not in text
    log_of(tmp_path)
    assert len(json.loads((tmp_path / "run.json").read_text())["sessions"]) == 1, "a new run"


def test_a_tracker_that_fails_is_dropped_with_one_warning(tmp_path, capsys):
    log = log_of(tmp_path, report_to=["tensorboard"])
    (tracker,) = log.trackers
    tracker.tracker.writer.close()
    tracker.tracker.writer = None
    for step in (1, 2):
        log.metrics(step, {"loss": 3.0})
    log.close()
    assert capsys.readouterr().err.count("warning: tensorboard cannot be written") == 1
    assert not log.trackers and len(lines(tmp_path / "metrics.jsonl")) == 2


def test_without_trackers_no_event_file_is_written(tmp_path):
    log = log_of(tmp_path)
    log.metrics(1, {"loss": 3.0})
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "run.json"]


def test_the_remaining_time_counts_from_where_a_resumed_run_started(tmp_path, capsys, monkeypatch):
    """2 steps in 6 s: 5 more take 15 s, however many steps an earlier process had made."""
    clock = iter([100.0, 106.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    log_of(tmp_path, finished_steps=3).metrics(5, {"loss": 1.0})
    assert capsys.readouterr().out.rstrip().endswith("ETA 0:00:15")


@pytest.mark.parametrize("text", [b"", b"\n", b"not json\n", b'{"time": 3}\n', b"[1]\n", "{'ü".encode()[:-1]])
def test_unreadable_lines_are_dropped_on_resume(text, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + text)
    log_of(tmp_path, finished_steps=1)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_a_sample_with_unusual_line_ends_is_kept_on_resume(tmp_path):
    text = "one\u2028two\x85three\x0cfour\r\n"
    log_of(tmp_path).samples(1, [{"prompt": text, "response": text, "score": 0.0}])
    log_of(tmp_path, finished_steps=1)
    (sample,) = lines(tmp_path / "samples.jsonl")
    assert sample["response"] == text


def test_a_full_disk_drops_whole_lines_with_one_warning_and_the_run_continues(tmp_path, capsys):
    log = log_of(tmp_path)
    for step in range(1, 4):
        log.metrics(step, {"loss": float(step)})
        log.samples(step, [{"prompt": "p", "response": "r" * 30, "score": 0.0}] * 2)
    sizes = {name: (tmp_path / name).stat().st_size for name in ("metrics.jsonl", "samples.jsonl")}
    for name, size in sizes.items():
        with limit_file_size(size + 20):  # 20 bytes of the next line would fit
            for step in (4, 5):
                log.metrics(step, {"loss": float(step)})
                log.samples(step, [{"prompt": "p", "response": "r" * 30, "score": 0.0}] * 2)
        assert (tmp_path / name).stat().st_size >= size
    log.metrics(6, {"loss": 6.0})  # disk space is available again
    log.samples(6, [{"prompt": "p", "response": "r", "score": 0.0}])
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")][:3] == [1, 2, 3]
    assert lines(tmp_path / "metrics.jsonl")[-1]["step"] == lines(tmp_path / "samples.jsonl")[-1]["step"] == 6
    text = capsys.readouterr()
    for name in sizes:
        assert text.err.count(f"warning: {name} cannot be written") == 1
    assert "train 4/10" in text.out and "train 6/10" in text.out, "the console still shows the metrics"


def test_a_resume_on_a_full_disk_keeps_the_metrics(tmp_path, capsys):
    log = log_of(tmp_path)
    for step in range(1, 6):
        log.metrics(step, {"loss": float(step)})
    written = lines(tmp_path / "metrics.jsonl")
    with limit_file_size(10):
        log_of(tmp_path, finished_steps=3)
    assert lines(tmp_path / "metrics.jsonl") == written[:3], "truncating needs no disk space"
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n{"step": 2}\n')
    with limit_file_size(10):
        log_of(tmp_path, finished_steps=3)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 9}, {"step": 2}], "a file that cannot be rewritten is kept"
    assert "warning: metrics.jsonl cannot be written" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("record", ["tensorboard", "run.json"])
def test_other_records_that_cannot_be_written_do_not_end_the_run(record, tmp_path, monkeypatch, capfd):
    events = str(tmp_path / "events")
    monkeypatch.setenv(failpoint.VARIABLE, f"log_{record}:raise#1")
    monkeypatch.setattr(failpoint, "_calls", Counter())
    log = log_of(tmp_path, report_to=["tensorboard"], tensorboard=events)
    for step in (1, 2):
        log.metrics(step, {"loss": 3.0})
    log.close()
    assert capfd.readouterr().err.count(f"warning: {record} cannot be written") == 1
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_console_on_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch):
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        log = log_of(tmp_path)
        log.metrics(1, {"loss": 3.0})
        log.info("still here")
        with suppress(OSError):
            full.close()  # flushing its buffer fails too
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1]
