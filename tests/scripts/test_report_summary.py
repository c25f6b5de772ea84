"""The summary of the report: origin, verdict in numbers, warnings, cost."""

import json
import sys

from repository import SCRIPTS
from run_files import sample, write_run

sys.path.insert(0, str(SCRIPTS))

from report_curves import curves_of  # noqa: E402
from report_inputs import read_run, read_runs  # noqa: E402
from report_summary import (  # noqa: E402
    UNKNOWN,
    cost,
    format_number,
    format_seconds,
    kind_of_run,
    named_inputs,
    summary_card,
    summary_samples,
    verdict,
    warnings_of,
)


def evaluations(**columns):
    count = len(next(iter(columns.values())))
    return [
        {"step": 10 * i, "phase": "eval"} | {name: values[i] for name, values in columns.items()} for i in range(count)
    ]


def verdicts(run):
    return {row["metric"]: row for row in verdict(run, curves_of(run))}


def test_inputs_that_are_runs_of_the_page_have_their_labels(tmp_path):
    sft, ppo = tmp_path / "a" / "sft", tmp_path / "a" / "ppo"
    write_run(sft, arguments={"model_name_or_path": "facebook/opt-125m", "output_dir": "output/a/sft"})
    write_run(tmp_path / "b" / "sft", arguments={})
    write_run(ppo, arguments={
        "actor_model_name_or_path": str(sft), "reward": ["/models/reward-7b@0.5", "length"],
        "critic_model_name_or_path": None, "data_path": ["/data/sets/prompts.jsonl"],
    })  # fmt: skip
    runs = read_runs([sft, tmp_path / "b" / "sft", ppo])
    assert named_inputs(runs[0], runs)[0] == ("from", "facebook/opt-125m", "facebook/opt-125m")
    assert [(role, short) for role, short, _ in named_inputs(runs[2], runs)] == [
        ("from", "a/sft"), ("reward", "models/reward-7b@0.5"), ("reward", "length"), ("data", "sets/prompts.jsonl")
    ]  # fmt: skip


def test_the_kind_of_a_run_names_its_algorithm(tmp_path):
    assert kind_of_run(read_run(write_run(tmp_path / "a", arguments={"algorithm": "grpo"}))) == "RLHF · grpo"
    dpo = write_run(tmp_path / "b", name="step2_dpo_finetuning", arguments={"preference_loss": "ipo"})
    assert kind_of_run(read_run(dpo)) == "Preference training · ipo"


def test_the_verdict_compares_first_and_last_evaluation_and_names_the_best(tmp_path):
    rows = evaluations(judge=[0.25, 0.75, 0.5], perplexity=[9.0, 3.0, 4.0], kl=[0.0, 1.0, 2.0])
    rows.append({"step": 5, "phase": "train", "judge": 0.9})
    found = verdicts(read_run(write_run(tmp_path / "run", metrics=rows)))
    judge, perplexity, kl = found["judge"], found["perplexity"], found["kl"]
    assert (judge["first"], judge["last"], judge["better"], judge["best"]) == (0.25, 0.5, "better", (10, 0.75))
    assert (perplexity["last"], perplexity["better"], perplexity["best"]) == (4.0, "better", (10, 3.0))
    assert (kl["better"], kl["best"]) == ("", None)  # neither direction of the KL is the aim


def test_without_evaluations_the_verdict_is_on_means_of_training(tmp_path):
    scores = [9.0] + [1.0] * 18 + [3.0]  # tenths of 20 values: means 5 and 2
    rows = [{"step": i, "phase": "train", "score": score} for i, score in enumerate(scores)]
    row = verdicts(read_run(write_run(tmp_path / "run", metrics=rows)))["score"]
    assert (row["phase"], row["first"], row["last"], row["better"]) == ("train", 5.0, 2.0, "worse")


def test_the_verdict_has_the_standard_error_of_evaluated_samples(tmp_path):
    samples = [sample(step, p, "r", score=step * factor) for step in (0, 10) for p, factor in (("p", 0.1), ("q", 0.3))]
    folder = write_run(tmp_path / "run", metrics=evaluations(score=[0.0, 2.0], judge=[0.0, 1.0]), samples=samples)
    run = read_run(folder)
    assert verdicts(run)["score"]["change"] == (2.0, 1.0, 2)  # changes 1 and 3: deviation √2, over √2
    assert verdicts(run)["judge"]["change"] is None
    assert "change +2, standard error 1 over 2 prompts" in summary_card(run, [run], curves_of(run))


def test_warnings_have_the_value_its_usual_range_and_what_to_do(tmp_path):
    rows = [{"step": i, "phase": "train", "entropy": 0.001, "kl": 1.0, "clip_fraction": 0.5} for i in range(3)]
    run = read_run(write_run(tmp_path / "run", metrics=rows))
    lines = warnings_of(run, curves_of(run))
    assert [line.split(" ")[0] for line in lines] == ["Entropy", "Clipped"]
    assert "(entropy) 0.001, usual at least 0.05: " in lines[0] and "--kl_coef" in lines[0]


def test_the_cost_is_read_from_the_files(tmp_path):
    rows = [
        {"step": 1, "time": 100.0, "phase": "train", "response_length": 10.0, "responses": 8, "peak_memory_gib": 3.5},
        {"step": 1, "time": 110.0, "phase": "eval", "response_length": 10.0, "responses": 8},
        {"step": 2, "time": 200.0, "phase": "train", "response_length": 20.0, "responses": 8, "peak_memory_gib": 3.25},
    ]
    folder = write_run(tmp_path / "run", metrics=rows)
    info = json.loads((folder / "run.json").read_text()) | {
        "started": "2026-01-01T00:00:00+00:00", "devices": {"accelerator": "cuda", "processes": 8, "name": "cuda:0"}
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(info))
    run = read_run(folder)
    assert dict(cost(run, curves_of(run))) == {
        "Duration": "3.3 min", "Steps": "2", "Tokens sampled": "240", "Peak memory": "3.50 GiB, main process",
        "Devices": "8 × cuda:0", "Started": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip


def test_what_the_files_do_not_have_is_not_invented(tmp_path):
    run = read_run(tmp_path / "absent")
    assert {text for _, text in cost(run, {})} == {UNKNOWN}
    card = summary_card(run, [run], {})
    assert "No results logged yet" in card and summary_samples(run) == ""


def test_the_throughput_weighs_steps_by_their_time(tmp_path):
    rows = [{"step": i, "phase": "train", "tokens_per_second": rate} for i, rate in enumerate((100.0, 300.0))]
    run = read_run(write_run(tmp_path / "run", metrics=rows))
    assert dict(cost(run, curves_of(run)))["Throughput"] == "150 tokens/s"  # 2 / (1/100 + 1/300)


def test_the_samples_of_the_summary_are_before_after_best_and_worst(tmp_path):
    samples = [sample(0, "p", "old & gray")] + [sample(9, "p", f"r{score}", score=score) for score in range(8)]
    html = summary_samples(read_run(write_run(tmp_path / "run", samples=samples)))
    assert html.index("old &amp; gray") < html.index("r7") < html.index("r5")
    assert html.index("Best 3") < html.index("r6") < html.index("Worst 3") < html.index("r1")
    assert "r4" not in html and "r3" not in html


def test_numbers_have_three_digits_and_durations_a_unit():
    assert [format_number(x) for x in (0.0, 0.123456, -2.5, 1234.5, 1e-5)] == ["0", "0.123", "-2.5", "1234", "1.00e-05"]
    assert [format_seconds(x) for x in (12, 600, 7200)] == ["12 s", "10.0 min", "2.0 h"]
