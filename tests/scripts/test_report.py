"""The report of a run: a self-contained page from whatever files exist."""

import json
import re
import sys

import pytest
from repository import SCRIPTS

sys.path.insert(0, str(SCRIPTS))

import report  # noqa: E402


def write_run(folder, *, name="step3_rlhf_finetuning", metrics=None, samples=None):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"name": name, "arguments": {"kl_coef": 0.1, "data_path": ["a", "b"]}}))
    rows = metrics or [
        {"step": 1, "time": 2.0, "phase": "train", "loss": 3.0, "note": "text", "flag": True},
        {"step": 2, "time": 4.0, "phase": "train", "loss": 2.0, "kl": None},
        {"step": 2, "time": 4.5, "phase": "eval", "eval_loss": 2.5, "judge": 0.75},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples or []))
    return folder


def embedded(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def sample(step, prompt, response, phase="eval"):
    return {"step": step, "phase": phase, "prompt": prompt, "response": response, "score": 0.5, "judge": None}


def test_a_curve_has_step_time_and_value_of_each_phase(tmp_path):
    page = report.page([report.read_run(write_run(tmp_path / "run"))])
    panels = {panel["metric"]: panel for panel in embedded(page)[0]}
    assert set(panels) == {"loss", "judge"}  # text, booleans and nulls are no curves
    lines = {line["phase"]: line["points"] for line in panels["loss"]["lines"]}
    assert lines == {"train": [[1, 2.0, 3.0], [2, 4.0, 2.0]], "eval": [[2, 4.5, 2.5]]}


def test_metrics_with_former_names_share_the_plot_of_the_new_name(tmp_path):
    old = [{"step": 1, "phase": "train", "rollout_gap_mean": 0.25, "rollout_gap_max": 2.0}]
    new = [{"step": 1, "phase": "train", "rollout_logprob_mismatch_mean": 0.5, "eval_rollout_gap_max": 4.0}]
    runs = [report.read_run(write_run(tmp_path / name, metrics=lines)) for name, lines in (("a", old), ("b", new))]
    panels = embedded(report.page(runs))[0]
    panels = {panel["metric"]: [line["points"][0][2] for line in panel["lines"]] for panel in panels}
    assert panels == {"rollout_logprob_mismatch_mean": [0.25, 0.5], "rollout_logprob_mismatch_max": [2.0, 4.0]}


def test_runs_of_the_same_step_share_their_plots(tmp_path):
    runs = [
        report.read_run(write_run(tmp_path / "seed1")),
        report.read_run(write_run(tmp_path / "seed2")),
        report.read_run(write_run(tmp_path / "sft", name="step1_supervised_finetuning")),
    ]
    sections = embedded(report.page(runs))
    labels = [sorted({line["label"] for panel in section for line in panel["lines"]}) for section in sections]
    assert labels == [["seed1", "seed2"], ["sft"]]


def test_model_output_cannot_become_markup(tmp_path):
    evil = '<script>alert("x")</script>&{{DATA}}'
    metrics = [{"step": 1, "time": 0.0, "phase": "train", "</script><b>": 1.0}]
    samples = [sample(1, evil, evil), sample(2, evil, evil)]
    folder = write_run(tmp_path / "run", name=evil, metrics=metrics, samples=samples)
    page = report.page([report.read_run(folder)])
    assert "<script>alert" not in page and "</script><b>" not in page
    assert page.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;&amp;{{DATA}}") >= 3
    assert embedded(page)[0][0]["metric"] == "</script><b>"


def test_the_page_loads_no_other_file_or_address(tmp_path):
    page = report.page([report.read_run(write_run(tmp_path / "run"))])
    addresses = re.findall(r"https?://[^\"'\s<]+", page)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}  # a namespace, never fetched
    assert not re.search(r"<(link|img|iframe)\b|\bsrc=|@import|url\(", page)


def test_before_and_after_are_the_first_and_last_response_of_the_same_prompt():
    samples = [
        sample(0, "p", "first"), sample(0, "p", "another at the first step"), sample(5, "p", "middle"),
        sample(9, "p", "last"), sample(9, "p", "another at the last step"), sample(9, "q", "once"),
        sample(1, "t", "from training", phase="train"),
    ]  # fmt: skip
    pairs = report.before_and_after(samples, limit=10)
    assert [(a["response"], b and b["response"]) for a, b in pairs] == [("first", "last"), ("once", None)]
    assert report.before_and_after(samples, limit=1)[0][0]["response"] == "first"


def test_training_samples_are_shown_if_there_are_no_evaluation_samples():
    samples = [sample(1, "p", "a", phase="train"), sample(2, "p", "b", phase="train")]
    assert [(a["response"], b["response"]) for a, b in report.before_and_after(samples, limit=5)] == [("a", "b")]


def test_a_truncated_last_line_is_noted_and_the_other_lines_are_plotted(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "ti')
    run = report.read_run(folder)
    assert len(run.metrics) == 3
    assert any("metrics.jsonl: 1 unreadable" in note and "line 4" in note and "truncated" in note for note in run.notes)
    assert "line 4" in report.page([run])


def test_missing_and_invalid_files_are_noted(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{oops")
    (folder / "metrics.jsonl").write_bytes(b'\xff\xfe\n[1, 2]\n{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1.0}\n')
    run = report.read_run(folder)
    notes = " ".join(run.notes)
    assert "run.json: not valid JSON" in notes and "samples.jsonl is missing" in notes and "2 unreadable" in notes
    panels = embedded(report.page([run]))[0]
    assert panels[0]["lines"][0]["points"] == [[2, None, 1.0]]  # NaN breaks the curve


BAD_METRICS = {
    "nested": b"[" * 100_000,
    "nested object": b'{"a":' * 500 + b"1" + b"}" * 500,
    "huge integer": b'{"step": 1, "loss": ' + b"9" * 5000 + b"}",
    "lone surrogate": b'{"step": 1, "\\ud800": 1.0}',
    "not UTF-8": b'{"step": 1, "loss\xff": 1.0}',
    "no object": b"3",
}
ODD_METRICS = [
    {"step": [1], "loss": 1.0}, {"step": "1", "loss": 1.0}, {"step": 1, "loss": {"a": [1]}}, {"step": 1, "loss": "1"},
    {"step": 1, "phase": ["eval"], "time": {}, "loss": 10**300}, {"step": 1, "phase": 3, "loss": True},
]  # fmt: skip


@pytest.mark.parametrize("line", BAD_METRICS.values(), ids=BAD_METRICS)
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "samples.jsonl"])
def test_an_invalid_file_is_one_note_and_the_page_is_written(name, line, tmp_path, capsys):
    folder = write_run(tmp_path / "run", samples=[sample(1, "p", "r")])
    path = folder / name
    path.write_bytes(line if name == "run.json" else path.read_bytes() + line + b"\n")
    assert report.main([str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert [panel["metric"] for panel in embedded((tmp_path / "page.html").read_text())[0]] == ["judge", "loss"]
    notes = [text for text in capsys.readouterr().out.splitlines() if name in text]
    assert len(notes) == 1 and ("line" in notes[0] or name == "run.json")
    assert len(notes[0]) < 400


def test_values_of_other_types_are_neither_plotted_nor_an_error(tmp_path):
    samples = [{"step": {}, "prompt": "p", "response": "r", "score": "high"}, {"prompt": ["p"], "response": "r"},
               {"prompt": "p", "response": None}]  # fmt: skip
    run = report.read_run(write_run(tmp_path / "run", metrics=ODD_METRICS, samples=samples))
    (panels,) = embedded(report.page([run]))
    assert [panel["metric"] for panel in panels] == ["loss"]
    assert panels[0]["lines"][0]["points"] == [[1, None, 1e300]]


def test_settings_are_flattened():
    assert report.flat({"a": {"b": 1, "c": {"d": [2]}}, "e": "x", "f": {}}) == [
        ("a.b", "1"), ("a.c.d", "[2]"), ("e", "x"), ("f", "{}")
    ]  # fmt: skip


def test_the_program_writes_the_page_or_exits_with_status_2_if_no_run_has_data(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    target = tmp_path / "new" / "report.html"
    assert report.main([str(folder), str(tmp_path / "absent"), "-o", str(target)]) == 0
    assert "no such folder" in target.read_text() and "no such folder" in capsys.readouterr().out
    assert report.main([str(tmp_path / "absent"), "-o", str(target)]) == 2
    assert "--output_dir" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["TITLE", "DATA", "BODY"])
def test_the_template_has_every_placeholder(name):
    assert "{{" + name + "}}" in report.TEMPLATE.read_text()
