"""Step 2's make_preferences.py end to end: judges, rewards, interruptions and resume."""

import json
import signal
from pathlib import Path

import pytest
from repository import TRAINING
from rlhf_models import QUESTIONS, save_models

TOOL = TRAINING / "step2_reward_model_finetuning" / "make_preferences.py"
JUDGE = """
def judge(prompts, responses, rows):
    return [row["sign"] * len(response) for row, response in zip(rows, responses)]

def half_the_rows(responses, rows):
    return [len(response) if row["sign"] > 0 else None for row, response in zip(rows, responses)]

def always_exits(prompts, responses, rows):
    raise SystemExit("out of credit")

def fails_on_multiples_of_three(prompts, responses, rows):
    if any(len(response) % 3 == 0 for response in responses):
        raise KeyError("three")
    return judge(prompts, responses, rows)

def constant(prompts, responses, rows):
    return [0] * len(responses)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = save_models(tmp_path_factory.mktemp("models"))
    rows = [{"prompt": question, "sign": (-1) ** number} for number, question in enumerate(QUESTIONS[:7])]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "judge.py").write_text(JUDGE)
    return root


def arguments(folder: Path, output: Path, judge: str = "judge", **more) -> list:
    flags = {
        "model_name_or_path": folder / "actor", "data_path": folder / "prompts.jsonl", "output_dir": output,
        "judge": f"{folder / 'judge.py'}:{judge}", "dtype": "fp32", "eval_fraction": 0, "num_samples_per_prompt": 3,
        "pairs_per_prompt": 2, "max_prompt_seq_len": 64, "max_answer_seq_len": 8,
        "per_device_generation_batch_size": 3,  # 7 prompts on two ranks: 3 + 1 and 3, so one has nothing at the end
    } | more  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


def test_the_file_of_pairs_is_the_same_from_one_rank_and_two(folder, programs, tmp_path):
    for processes in (1, 2):
        output = tmp_path / f"{processes}"
        programs.run(TOOL, arguments(folder, output), processes=processes, log=tmp_path / f"log-{processes}")
    alone, together = ((tmp_path / n / "preferences.jsonl").read_text(encoding="utf-8") for n in ("1", "2"))
    assert alone == together
    rows = [json.loads(line) for line in alone.splitlines()]
    prompts = [row["prompt"][0]["content"] for row in rows]
    assert {row[f"{name}_ended"] for row in rows for name in ("chosen", "rejected")} == {True, False}
    assert len(rows) > 7 and set(prompts) == set(QUESTIONS[:7]) and max(map(prompts.count, prompts)) <= 2
    for row in rows:
        assert row["prompt"] == [{"role": "user", "content": row["prompt"][0]["content"]}]
        sign = (-1) ** QUESTIONS.index(row["prompt"][0]["content"])
        assert row["chosen_score"] == sign * len(row["chosen"]) > sign * len(row["rejected"]) == row["rejected_score"]


def test_equal_prompts_get_different_samples(folder, programs, tmp_path):
    twice = tmp_path / "twice.jsonl"
    twice.write_text(f'{{"prompt": "{QUESTIONS[0]}", "sign": 1}}\n' * 2)
    # Given twice as a source, as weights would have it: row numbers repeat too.
    argv = arguments(folder, tmp_path / "out", data_path=f"{twice}:3", num_samples_per_prompt=2, pairs_per_prompt=1)
    at = argv.index("--data_path") + 2
    other = folder / "prompts.jsonl"
    programs.run(TOOL, argv[:at] + [f"{other}:0.1"] + argv[at:], log=tmp_path / "log")
    rows = [json.loads(line) for line in (tmp_path / "out" / "preferences.jsonl").read_text().splitlines()]
    same = [row[name] for row in rows if row["prompt"][0]["content"] == QUESTIONS[0] for name in ("chosen", "rejected")]
    assert len(same) > 10 and len(set(same)) > 0.9 * len(same)  # two short answers may be alike by chance


def test_equal_scores_everywhere_end_with_status_2_and_the_remedy(folder, programs, tmp_path):
    argv = arguments(folder, tmp_path / "out", judge="constant")
    text = programs.run(TOOL, argv, log=tmp_path / "log", code=2)
    assert "Traceback" not in text
    assert "no preference pairs from 7 prompts" in text and "--num_samples_per_prompt" in text
    assert not (tmp_path / "out" / "preferences.jsonl").exists()


def test_rewards_score_responses_as_a_judge_does(folder, programs, tmp_path):
    argv = arguments(folder, tmp_path / "out")
    at = argv.index("--judge")
    # One reward of weight 2, one of -1 without a score for half the rows, and a reward model of tiny weight.
    sources = [f"{folder / 'judge.py'}:judge@2", f"{folder / 'judge.py'}:half_the_rows@-1", f"{folder / 'reward'}@1e-9"]
    programs.run(TOOL, [*argv[:at], *argv[at + 2 :], "--reward", *sources], log=tmp_path / "log")
    rows = [json.loads(line) for line in (tmp_path / "out" / "preferences.jsonl").read_text().splitlines()]
    assert len(rows) > 7
    for row in rows:
        sign = (-1) ** QUESTIONS.index(row["prompt"][0]["content"])
        for name in ("chosen", "rejected"):
            expected = sign * 2 * len(row[name]) - (len(row[name]) if sign > 0 else 0)
            assert row[f"{name}_score"] == pytest.approx(expected, abs=1e-4)


def test_exactly_one_of_judge_and_reward_is_required_and_every_mistake_is_named(folder, programs, tmp_path):
    argv = arguments(folder, tmp_path / "out")
    text = programs.run(TOOL, [*argv, "--reward", "lenght"], log=tmp_path / "log", code=2)
    assert "--judge and --reward: set exactly one" in text and "did you mean length?" in text
    at = argv.index("--judge")
    text = programs.run(TOOL, [*argv[:at], *argv[at + 2 :]], log=tmp_path / "log-2", code=2)
    assert "--judge and --reward: set exactly one" in text


@pytest.fixture(scope="module")
def uninterrupted(folder, programs, tmp_path_factory) -> str:
    """The pairs of an uninterrupted run."""
    output = tmp_path_factory.mktemp("uninterrupted")
    programs.run(TOOL, arguments(folder, output), log=output / "log")
    return (output / "preferences.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("fail", "code", "before", "after"),
    [
        ("judged#2", -signal.SIGKILL, 1, 1),
        ("judged#1", -signal.SIGKILL, 1, 2),
        ("judged@1#1", None, 2, 1),
        ("judged:TERM#1", 75, 1, 1),
        ("judging:TERM@1#1", 75, 2, 2),
        ("judging:raise#2", 2, 1, 1),
        ("pairs_written:raise#1", 2, 1, 1),
        ("pairs_renamed#1", -signal.SIGKILL, 1, 1),
    ],
)
def test_an_interrupted_run_resumes_and_writes_the_same_file(
    fail, code, before, after, folder, uninterrupted, programs, tmp_path
):
    output = tmp_path / "out"
    final = output / "preferences.jsonl"
    printed = programs.run(TOOL, arguments(folder, output), processes=before, log=tmp_path / "log", code=code,
                        environment={"DSCHAT_FAILPOINT": fail})  # fmt: skip
    assert final.exists() == ("renamed" in fail)
    if code in (2, 75):
        assert "--resume auto" in printed and "Traceback" not in printed
    resumed = [*arguments(folder, output), "--resume", "auto"]
    printed = programs.run(TOOL, resumed, processes=after, log=tmp_path / "log-2")
    assert "resuming:" in printed and "resuming: 0 of" not in printed
    assert final.read_text(encoding="utf-8") == uninterrupted
    assert not (output / "preferences.part").exists()


def test_a_judge_that_always_fails_ends_the_run_and_another_finishes_it(folder, uninterrupted, programs, tmp_path):
    output = tmp_path / "out"
    judge = tmp_path / "judge.py"
    working = (folder / "judge.py").read_text()
    judge.write_text(working.replace("def judge(", "def spare(").replace("def always_exits(", "def judge("))
    argv = arguments(folder, output, per_device_generation_batch_size=2, judge_retries=0)
    argv[argv.index("--judge") + 1] = f"{judge}:judge"
    printed = programs.run(TOOL, argv, log=tmp_path / "log", code=2)
    assert "the judge returned no score for any response in 3 consecutive batches" in printed
    assert "SystemExit(out of credit)" in printed and "--resume auto" in printed and "Traceback" not in printed
    assert not (output / "preferences.jsonl").exists()
    judge.write_text(working)
    programs.run(TOOL, [*argv, "--resume", "auto"], log=tmp_path / "log-2")
    prompts = [json.loads(line)["prompt"] for line in (output / "preferences.jsonl").read_text().splitlines()]
    assert prompts == [json.loads(line)["prompt"] for line in uninterrupted.splitlines()], "no prompt is missing"


def test_responses_that_the_judge_fails_on_are_in_no_pair(folder, programs, tmp_path):
    programs.run(TOOL, arguments(folder, tmp_path / "out", "fails_on_multiples_of_three"), log=tmp_path / "log")
    rows = [json.loads(line) for line in (tmp_path / "out" / "preferences.jsonl").read_text().splitlines()]
    assert rows and all(len(row[name]) % 3 for row in rows for name in ("chosen", "rejected"))
    assert "KeyError: 'three'" in (tmp_path / "log").read_text()


def test_a_finished_file_is_replaced_only_with_overwrite_and_training_flags_are_refused(folder, programs, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "preferences.jsonl").write_text("precious\n")
    flags = {"save_interval": 1, "max_steps": 3, "num_train_epochs": 2, "offload": True, "deepspeed_config": "x",
             "enable_tensorboard": True, "eval_interval": 2, "response_column": "x", "judge_timeout": 0}  # fmt: skip
    printed = programs.run(TOOL, arguments(folder, output, **flags), log=tmp_path / "log", code=2)
    for flag in list(flags)[:-1]:
        assert f"--{flag} is not a flag of this step" in printed
    assert "--judge_timeout 0.0: must be above 0" in printed
    assert "preferences.jsonl already exists" in printed and "--overwrite" in printed
    assert (output / "preferences.jsonl").read_text() == "precious\n"
    programs.run(TOOL, [*arguments(folder, output), "--overwrite", "True"], log=tmp_path / "log-2")
    made = (output / "preferences.jsonl").read_text()
    assert "precious" not in made
    printed = programs.run(TOOL, [*arguments(folder, output), "--resume", "auto"], log=tmp_path / "log-3")
    assert "is already finished" in printed and (output / "preferences.jsonl").read_text() == made
