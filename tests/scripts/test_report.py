"""The report of runs: a self-contained page beside them from whatever files exist, and --watch."""

import base64
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from repository import SCRIPTS
from run_files import embedded, sample, write_run

sys.path.insert(0, str(SCRIPTS))

import report  # noqa: E402
from report_inputs import distinct_labels, elapsed_seconds, read_run, read_runs  # noqa: E402
from report_settings import differing_settings, flat  # noqa: E402


def test_runs_of_the_same_step_share_their_plots(tmp_path):
    write_run(tmp_path / "seed1")
    write_run(tmp_path / "seed2")
    write_run(tmp_path / "sft", name="step1_supervised_finetuning")
    runs = read_runs([tmp_path / "seed1", tmp_path / "sft", tmp_path / "seed2"])
    assert [section["runs"] for section in embedded(report.page(runs))["sections"]] == [["seed1", "seed2"], ["sft"]]


def test_labels_are_the_shortest_ends_of_paths_that_differ(tmp_path):
    a, b, c = tmp_path / "a" / "ppo", tmp_path / "b" / "ppo", tmp_path / "b" / "sft"
    assert distinct_labels([a, b, c]) == ["a/ppo", "b/ppo", "sft"]
    deep = [tmp_path / seed / "output" / "try" / "ppo" for seed in ("seed1", "seed2")]
    assert distinct_labels(deep) == ["seed1/…/ppo", "seed2/…/ppo"]
    # "x/…/ppo" would name both of the first two.
    same_ends = [tmp_path / path for path in ("x/1/m/ppo", "x/2/m/ppo", "y/m/ppo")]
    labels = distinct_labels(same_ends)
    assert len(set(labels)) == 3 and labels[2] == "y/m/ppo"


def test_two_runs_of_one_folder_name_are_told_apart_and_a_folder_given_twice_is_one_run(tmp_path):
    write_run(tmp_path / "a" / "ppo")
    write_run(tmp_path / "b" / "ppo")
    runs = read_runs([tmp_path / "a" / "ppo", tmp_path / "b" / "ppo", tmp_path / "b" / ".." / "a" / "ppo"])
    assert [run.label for run in runs] == ["a/ppo", "b/ppo"]
    page = report.page(runs)
    assert "a/ppo" in page and "b/ppo" in page


def test_model_output_cannot_become_markup(tmp_path):
    evil = '<script>alert("x")</script>&{{DATA}}'
    metrics = [{"step": 1, "time": 0.0, "phase": "train", "</script><b>": 1.0}]
    samples = [sample(step, evil, evil, score=step, rewards={evil: 1.0, "b": 2.0}) for step in (1, 1, 2, 2)]
    folder = write_run(tmp_path / "run", name=evil, metrics=metrics, samples=samples,
                       arguments={"model_name_or_path": evil, "algorithm": evil, "data_path": [evil]})  # fmt: skip
    page = report.page([read_run(folder)])
    assert "<script>alert" not in page and "</script><b>" not in page
    assert page.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;&amp;{{DATA}}") >= 3
    (section,) = embedded(page)["sections"]
    assert section["panels"][0]["metric"] == "</script><b>" and section["samples"][0][0]["prompt"] == evil


def test_the_page_loads_nothing_and_runs_only_its_own_script(tmp_path):
    page = report.page([read_run(write_run(tmp_path / "run"))])
    assert not re.search(r"<(link|img|iframe)\b|<script[^>]+src=|@import|url\(", page)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)[1]
    script = re.search(r"<script>(.*)</script>", page, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_the_page_has_the_licence_of_the_vendored_library(tmp_path):
    page = report.page([read_run(write_run(tmp_path / "run"))])
    licence = (SCRIPTS / "report_page" / "uplot" / "LICENSE").read_text()
    assert "The MIT License" in licence and "Copyright (c)" in licence and licence in page


def test_a_truncated_last_line_is_noted_and_the_other_lines_are_plotted(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "ti')
    run = read_run(folder)
    assert len(run.metrics) == 3
    assert any("metrics.jsonl: 1 unreadable" in note and "line 4" in note and "truncated" in note for note in run.notes)
    assert "line 4" in report.page([run])


def test_missing_and_invalid_files_are_noted(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{oops")
    (folder / "metrics.jsonl").write_bytes(b'\xff\xfe\n[1, 2]\n{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1.0}\n')
    run = read_run(folder)
    notes = " ".join(run.notes)
    assert "run.json: not valid JSON" in notes and "samples.jsonl is missing" in notes and "2 unreadable" in notes
    (section,) = embedded(report.page([run]))["sections"]
    assert section["axes"][0]["train"] == {"step": [2], "seconds": [None]}  # NaN is no point
    assert section["panels"][0]["lines"][0]["values"] == [1.0]


BAD_METRICS = {
    "nested": b"[" * 100_000,
    "nested object": b'{"a":' * 500 + b"1" + b"}" * 500,
    "huge integer": b'{"step": 1, "loss": ' + b"9" * 5000 + b"}",
    "lone surrogate": b'{"step": 1, "\\ud800": 1.0}',
    "not UTF-8": b'{"step": 1, "loss\xff": 1.0}',
    "no object": b"3",
}


@pytest.mark.parametrize("line", BAD_METRICS.values(), ids=BAD_METRICS)
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "samples.jsonl"])
def test_an_invalid_file_is_one_note_and_the_page_is_written(name, line, tmp_path, capsys):
    folder = write_run(tmp_path / "run", samples=[sample(1, "p", "r")])
    path = folder / name
    path.write_bytes(line if name == "run.json" else path.read_bytes() + line + b"\n")
    assert report.main([str(folder), "-o", str(tmp_path / "page.html")]) == 0
    (section,) = embedded((tmp_path / "page.html").read_text())["sections"]
    assert {panel["metric"] for panel in section["panels"]} == {"judge", "loss"}
    notes = [text for text in capsys.readouterr().out.splitlines() if name in text]
    assert len(notes) == 1 and ("line" in notes[0] or name == "run.json")
    assert len(notes[0]) < 400


ODD_INFO = [
    {"name": ["x"], "arguments": [1], "devices": "cpu", "started": 3},
    {"name": "step3_rlhf_finetuning", "arguments": {"data_path": [1, None, {}], "policy_loss": ["a"], "top_k": {}},
     "devices": {"processes": {}, "name": [1]}},
]  # fmt: skip
ODD_SAMPLES = [
    {"step": {}, "prompt": "p", "response": "r", "score": "high"}, {"prompt": ["p"], "response": "r"},
    {"prompt": "p", "response": None}, {"step": 1, "phase": [], "prompt": "p", "response": "r", "rewards": [1]},
    {"step": 1, "phase": "eval", "prompt": "p", "response": "r", "score": 10**400, "ended": 3},
]  # fmt: skip


@pytest.mark.parametrize("info", ODD_INFO, ids=["types", "values"])
def test_values_of_other_types_are_no_error(info, tmp_path):
    folder = write_run(tmp_path / "run", samples=ODD_SAMPLES)
    (folder / "run.json").write_text(json.dumps(info))
    assert "<section" in report.page(read_runs([folder]))


def test_seconds_continue_where_a_resumed_run_starts_again_at_zero():
    rows = [{"time": 2.0}, {"time": 5.0}, {"time": 1.0}, {"time": None}, {"time": 3.0}, {"time": 0.5}]
    assert elapsed_seconds(rows) == [2.0, 5.0, 6.0, None, 8.0, 8.5]


def test_settings_are_flattened():
    assert flat({"a": {"b": 1, "c": {"d": [2]}}, "e": "x", "f": {}}) == [
        ("a.b", "1"), ("a.c.d", "[2]"), ("e", "x"), ("f", "{}")
    ]  # fmt: skip


def test_differing_settings_are_those_without_the_same_value_in_every_run(tmp_path):
    same = {"kl_coef": 0.1, "data_path": ["a"]}
    write_run(tmp_path / "a", arguments=same | {"seed": 1, "output_dir": "a"})
    write_run(tmp_path / "b", arguments=same | {"seed": 2, "output_dir": "b", "top_k": 5})
    runs = read_runs([tmp_path / "a", tmp_path / "b"])
    assert differing_settings(runs) == [("arguments.seed", ["1", "2"]), ("arguments.top_k", [None, "5"])]


def test_the_page_of_one_run_is_in_its_folder_and_of_several_in_the_folder_that_has_all(tmp_path, monkeypatch):
    a, b = write_run(tmp_path / "out" / "a"), write_run(tmp_path / "out" / "deep" / "b")
    monkeypatch.chdir(tmp_path)
    assert report.main([str(a)]) == 0 and (a / "report.html").is_file()
    assert report.main(["out/a", str(b)]) == 0 and (tmp_path / "out" / "report.html").is_file()
    assert not (tmp_path / "report.html").exists()


def test_runs_without_a_folder_in_common_need_an_output(tmp_path, capsys):
    write_run(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        report.main([str(tmp_path / "run"), "/absent"])
    assert ended.value.code == 2 and "name the page with -o" in capsys.readouterr().err


def test_the_program_writes_the_page_or_exits_with_status_2_if_no_run_has_data(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    target = tmp_path / "new" / "report.html"
    assert report.main([str(folder), str(tmp_path / "absent"), "-o", str(target)]) == 0
    assert "no such folder" in target.read_text() and "no such folder" in capsys.readouterr().out
    assert report.main([str(tmp_path / "absent"), "-o", str(target)]) == 2
    assert "--output_dir" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["TITLE", "POLICY", "STYLE", "SCRIPT", "DATA", "BODY"])
def test_the_template_has_every_placeholder(name):
    assert "{{" + name + "}}" in (report.FILES / "template.html").read_text()


def wait_for(condition, process):
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_watch_waits_for_metrics_follows_them_and_leaves_a_page_that_stays(ending, tmp_path):
    folder, target = tmp_path / "run", tmp_path / "run" / "report.html"
    process = subprocess.Popen(
        [sys.executable, SCRIPTS / "report.py", folder, "--watch", "1"], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert "waiting for metrics" in process.stdout.readline()
        write_run(folder)
        wait_for(target.is_file, process)
        assert embedded(target.read_text())["refresh"] == 1
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7, "time": 9.0, "phase": "train", "loss": 1.5}\n')
        wait_for(lambda: 7 in embedded(target.read_text())["sections"][0]["axes"][0]["train"]["step"], process)
        process.send_signal(ending)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()
    assert embedded(target.read_text())["refresh"] is None
    assert [path.name for path in folder.glob(".*")] == []  # no temporary file
