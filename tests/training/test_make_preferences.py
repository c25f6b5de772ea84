"""Step 2's make_preferences.py: sampling answers, scoring them with a judge, and pairing."""

import importlib.util
import json
import signal
from pathlib import Path
from random import Random

import pytest
from repository import TRAINING
from rlhf_models import QUESTIONS, save_models

from dschat.data.datasets import DataOptions, build_dataset

TOOL = TRAINING / "step2_reward_model_finetuning" / "make_preferences.py"
JUDGE = """
def judge(prompts, responses, rows):
    return [row["sign"] * len(response) for row, response in zip(rows, responses)]

def reluctant(responses, rows):
    return [len(response) if row["sign"] > 0 else None for row, response in zip(rows, responses)]

def dead(prompts, responses, rows):
    raise SystemExit("no more credit")

def fussy(prompts, responses, rows):
    if any(len(response) % 3 == 0 for response in responses):
        raise KeyError("three")
    return judge(prompts, responses, rows)

def indifferent(prompts, responses, rows):
    return [0] * len(responses)
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_preferences", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = save_models(tmp_path_factory.mktemp("models"))
    rows = [{"prompt": question, "sign": (-1) ** number} for number, question in enumerate(QUESTIONS[:7])]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "judge.py").write_text(JUDGE)
    return root


def pairs(tool, answers, scores, at_most=99, seed=0):
    ended = [True] * len(answers)
    found = tool.preference_pairs(answers, scores, ended=ended, at_most=at_most, chooser=Random(seed))
    return sorted((p["chosen"], p["rejected"], p["chosen_score"], p["rejected_score"]) for p in found)


def test_every_pair_puts_the_better_answer_first_and_ties_make_none(tool):
    assert pairs(tool, ["a", "b", "c"], [1, 3, 1]) == [("b", "a", 3.0, 1.0), ("b", "c", 3.0, 1.0)]
    assert pairs(tool, ["a", "b"], [-2.0, -5.0]) == [("a", "b", -2.0, -5.0)]
    assert pairs(tool, ["a", "b"], [1.0, 1.0]) == []


def test_no_text_is_paired_with_itself_and_an_empty_answer_with_nothing(tool):
    assert pairs(tool, ["a", "a ", "\n"], [1, 2, 3]) == []


def test_at_most_so_many_pairs_are_chosen_at_random_by_the_seed_and_none_twice(tool):
    answers, scores = list("abcdef"), [1, 2, 3, 4, 5, 6]
    every = pairs(tool, answers, scores)
    assert len(every) == 15
    some = [pairs(tool, answers, scores, at_most=4, seed=seed) for seed in range(20)]
    assert all(len(set(chosen)) == 4 and set(chosen) <= set(every) for chosen in some)
    assert some[0] == pairs(tool, answers, scores, at_most=4, seed=0)
    assert set(sum(some, [])) == set(every), "every pair has its chance"


def test_a_pair_knows_which_answer_was_cut_and_step_2_ends_only_the_other(tool, tmp_path, tiny_tokenizer):
    (pair,) = tool.preference_pairs(["the cat", "the dog"], [1, 2], ended=[False, True], at_most=1, chooser=Random(0))
    assert (pair["chosen_ended"], pair["rejected_ended"]) == (True, False)
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "the mat", **pair}) + "\n")
    end, options = tiny_tokenizer.eos_token_id, DataOptions([str(file)], str(tmp_path), 64, eval_fraction=0.0, phase=2)
    row = build_dataset("preference", tiny_tokenizer, options).train[0]
    start = row["prompt_length"]
    assert tiny_tokenizer.decode(row["chosen_ids"][start:]) == "the dog<|im_end|>" and row["chosen_ids"][-1] == end
    assert tiny_tokenizer.decode(row["rejected_ids"][start:]) == "the cat"
    assert row["length"] == len(row["chosen_ids"]) + len(row["rejected_ids"])
    unpaired = build_dataset("unpaired", tiny_tokenizer, options).train
    assert [ids[-1] == end for ids in unpaired["input_ids"]] == [True, False]


def arguments(folder: Path, output: Path, judge: str = "judge", **flags) -> list:
    given = {
        "model_name_or_path": folder / "actor", "data_path": folder / "prompts.jsonl", "output_dir": output,
        "judge": f"{folder / 'judge.py'}:{judge}", "dtype": "fp32", "eval_fraction": 0, "num_samples_per_prompt": 3,
        "pairs_per_prompt": 2, "max_prompt_seq_len": 64, "max_answer_seq_len": 8,
        "per_device_generation_batch_size": 3,  # 7 prompts on two ranks: 3 + 1 and 3, so one has nothing at the end
    } | flags  # fmt: skip
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def test_pairs_of_a_models_own_answers_are_data_for_step_2_the_same_from_one_rank_and_two(folder, programs, tmp_path):
    for processes in (1, 2):
        output = tmp_path / f"{processes}"
        programs.run(TOOL, arguments(folder, output), processes=processes, log=tmp_path / f"log-{processes}")
    alone, together = ((tmp_path / n / "preferences.jsonl").read_text(encoding="utf-8") for n in ("1", "2"))
    assert alone == together
    rows = [json.loads(line) for line in alone.splitlines()]
    asked = [row["prompt"][0]["content"] for row in rows]
    assert {row[f"{name}_ended"] for row in rows for name in ("chosen", "rejected")} == {True, False}
    assert len(rows) > 7 and set(asked) == set(QUESTIONS[:7]) and all(asked.count(prompt) <= 2 for prompt in asked)
    for row in rows:
        assert row["prompt"] == [{"role": "user", "content": row["prompt"][0]["content"]}]
        sign = (-1) ** QUESTIONS.index(row["prompt"][0]["content"])
        assert row["chosen_score"] == sign * len(row["chosen"]) > sign * len(row["rejected"]) == row["rejected_score"]


def test_prompts_alike_are_answered_unlike(folder, programs, tmp_path):
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


def test_a_judge_who_finds_all_answers_alike_stops_the_tool_with_the_way_out(folder, programs, tmp_path):
    argv = arguments(folder, tmp_path / "out", judge="indifferent")
    text = programs.run(TOOL, argv, log=tmp_path / "log", code=2)
    assert "Traceback" not in text
    assert "no pair came of 7 prompts" in text and "--num_samples_per_prompt" in text
    assert not (tmp_path / "out" / "preferences.jsonl").exists()


def test_rewards_score_answers_as_a_judge_does(folder, programs, tmp_path):
    argv = arguments(folder, tmp_path / "out")
    at = argv.index("--judge")
    # One reward of weight 2, one of -1 without a score for half the rows, and a reward model of tiny weight.
    sources = [f"{folder / 'judge.py'}:judge@2", f"{folder / 'judge.py'}:reluctant@-1", f"{folder / 'reward'}@1e-9"]
    programs.run(TOOL, [*argv[:at], *argv[at + 2 :], "--reward", *sources], log=tmp_path / "log")
    rows = [json.loads(line) for line in (tmp_path / "out" / "preferences.jsonl").read_text().splitlines()]
    assert len(rows) > 7
    for row in rows:
        sign = (-1) ** QUESTIONS.index(row["prompt"][0]["content"])
        for name in ("chosen", "rejected"):
            expected = sign * 2 * len(row[name]) - (len(row[name]) if sign > 0 else 0)
            assert row[f"{name}_score"] == pytest.approx(expected, abs=1e-4)


def test_one_of_judge_and_reward_is_asked_for_and_every_mistake_named(folder, programs, tmp_path):
    argv = arguments(folder, tmp_path / "out")
    text = programs.run(TOOL, [*argv, "--reward", "lenght"], log=tmp_path / "log", code=2)
    assert "--judge and --reward: one of them" in text and "did you mean length?" in text
    at = argv.index("--judge")
    text = programs.run(TOOL, [*argv[:at], *argv[at + 2 :]], log=tmp_path / "log-2", code=2)
    assert "--judge and --reward: one of them" in text


@pytest.fixture(scope="module")
def unbroken(folder, programs, tmp_path_factory) -> str:
    """The pairs of a run that nothing disturbs."""
    output = tmp_path_factory.mktemp("unbroken")
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
def test_a_run_that_is_disturbed_goes_on_to_the_same_file(
    fail, code, before, after, folder, unbroken, programs, tmp_path
):
    output = tmp_path / "out"
    final = output / "preferences.jsonl"
    said = programs.run(TOOL, arguments(folder, output), processes=before, log=tmp_path / "log", code=code,
                        environment={"DSCHAT_FAILPOINT": fail})  # fmt: skip
    assert final.exists() == ("renamed" in fail)
    if code in (2, 75):
        assert "--resume auto" in said and "Traceback" not in said
    said = programs.run(TOOL, [*arguments(folder, output), "--resume", "auto"], processes=after, log=tmp_path / "log-2")
    assert "going on:" in said and "going on: 0 of" not in said
    assert final.read_text(encoding="utf-8") == unbroken
    assert not (output / "preferences.part").exists()


def test_a_dead_judge_ends_the_run_and_another_judges_the_rest(folder, unbroken, programs, tmp_path):
    output = tmp_path / "out"
    judge = tmp_path / "judge.py"
    mended = (folder / "judge.py").read_text()
    judge.write_text(mended.replace("def judge(", "def spare(").replace("def dead(", "def judge("))
    argv = arguments(folder, output, per_device_generation_batch_size=2, judge_retries=0)
    argv[argv.index("--judge") + 1] = f"{judge}:judge"
    said = programs.run(TOOL, argv, log=tmp_path / "log", code=2)
    assert "the judge returned no score for any response in 3 consecutive batches" in said
    assert "SystemExit(no more credit)" in said and "--resume auto" in said and "Traceback" not in said
    assert not (output / "preferences.jsonl").exists()
    judge.write_text(mended)
    programs.run(TOOL, [*argv, "--resume", "auto"], log=tmp_path / "log-2")
    asked = [json.loads(line)["prompt"] for line in (output / "preferences.jsonl").read_text().splitlines()]
    assert asked == [json.loads(line)["prompt"] for line in unbroken.splitlines()], "no prompt is missing"


def test_answers_that_the_judge_fails_on_are_left_out(folder, programs, tmp_path):
    programs.run(TOOL, arguments(folder, tmp_path / "out", "fussy"), log=tmp_path / "log")
    rows = [json.loads(line) for line in (tmp_path / "out" / "preferences.jsonl").read_text().splitlines()]
    assert rows and all(len(row[name]) % 3 for row in rows for name in ("chosen", "rejected"))
    assert "KeyError: 'three'" in (tmp_path / "log").read_text()


def test_a_finished_file_is_not_replaced_and_flags_of_training_are_none_of_this_tool(folder, programs, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "preferences.jsonl").write_text("precious\n")
    flags = {"save_interval": 1, "max_steps": 3, "num_train_epochs": 2, "offload": True, "deepspeed_config": "x",
             "enable_tensorboard": True, "eval_interval": 2, "response_column": "x", "judge_timeout": 0}  # fmt: skip
    said = programs.run(TOOL, arguments(folder, output, **flags), log=tmp_path / "log", code=2)
    for flag in list(flags)[:-1]:
        assert f"--{flag} is no flag of this step" in said
    assert "--judge_timeout 0.0: must be above 0" in said
    assert "preferences.jsonl is there already" in said and "--overwrite" in said
    assert (output / "preferences.jsonl").read_text() == "precious\n"
    programs.run(TOOL, [*arguments(folder, output), "--overwrite", "True"], log=tmp_path / "log-2")
    made = (output / "preferences.jsonl").read_text()
    assert "precious" not in made
    said = programs.run(TOOL, [*arguments(folder, output), "--resume", "auto"], log=tmp_path / "log-3")
    assert "nothing is left to do" in said and (output / "preferences.jsonl").read_text() == made
