"""Step 3 end to end: every flag of algorithm, rewards and evaluation; and all state that a resumed run restores."""

import json
import signal
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from programs import MAINS
from step_materials import flags, metrics_of, weights_of, write_materials, write_rows
from transformers import AutoModelForCausalLM

from dschat.arguments import EvaluationArguments, PPOArguments, RewardArguments
from dschat.checkpoints.selection import newest_checkpoint
from dschat.losses.policy_table import POLICY_LOSSES
from dschat.rlhf.algorithms import ALGORITHMS
from dschat.runs.signals import SAVED

REWARD = """
import re
def number(prompt): return int(re.search(r"[0-9]+", prompt)[0])
def some(prompts, responses, rows):  # every third prompt has one score for all responses
    return [1.0 if number(p) % 3 == 0 else sum(map(ord, r)) % 7 / 3 for p, r in zip(prompts, responses)]
def level(prompts, responses, rows):
    return [number(p) / 10 for p in prompts]
"""
MORE_REWARDS = ["length?max=4@0.5", "repetition@0.1", "{materials}/reward@2", "{materials}/reward.py:some"]
# Each value of each choice, and each other flag away from its default, in one of these runs
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {
        "dual_clip": 3.0, "entropy_coef": 0.01, "actor_freeze_steps": 3, "kl_in": "reward", "kl_estimator": "k1",
        "gamma": 0.99, "gae_lambda": 0.9, "value_clip_range": 0.5, "whiten_advantages": False, "mask_truncated": True,
        "num_samples_per_prompt": 2, "clip_range_low": 0.1, "clip_range_high": 0.3, "reward_clip": 2.0, "processes": 2,
        "unsup_coef": 0.1, "unsupervised_dataset_name": "{materials}/texts.jsonl", "zero": 3,
        "eval_num_samples": 4, "eval_success_score": 0.5, "eval_answer": "text", "best_metric": "pass@2",
        "policy_loss": "ppo_clip", "old_logprobs": "recompute", "rollout_correction": "none",
    },
    "grpo": {
        "reward": MORE_REWARDS, "reward_retries": 1, "reward_timeout": 60.0, "normalize_rewards": True, "zero": 3,
        "eval_num_samples": 3, "eval_answer": "tag", "best_metric": "kl", "best_mode": "min", "dump_step": 2,
        "loss_aggregation": "seq_mean_token_mean", "processes": 2, "kl_in": "loss", "kl_estimator": "k3",
        "kl_clip": 5.0,
    },
    "dr_grpo": {
        "kl_coef": 0.1, "kl_estimator": "k3+", "rollout_correction": "tis", "rollout_correction_cap": 1.5,
        "top_p": 0.9, "dynamic_sampling": 2, "reward": ["{materials}/reward.py:some"], "eval_num_samples": 2,
        "loss_aggregation": "seq_mean_token_sum_norm", "reward_model_name_or_path": None, "processes": 2,
    },
    "rloo": {
        "policy_loss": "gspo", "rollout_correction": "seq_tis", "kl_target": 0.01, "kl_horizon": 100.0,
        "eval_num_samples": 2, "eval_answer": "boxed", "top_k": 50,
    },
    "reinforce++": {"policy_loss": "cispo", "rollout_correction": "mis", "rollout_correction_floor": 0.8, "top_k": 300},
    "reinforce++_baseline": {
        "policy_loss": "sapo", "sapo_positive_temperature": 2.0, "sapo_negative_temperature": 3.0, "kl_estimator": "k2",
        "ref_refresh_interval": 1, "actor_lora_dim": 2, "clip_range": None,
    },
    "remax": {
        "old_logprobs": "rollout", "ppo_epochs": 1, "kl_coef": 0.0, "clip_range": 0.3, "eval_answer": "last_number",
        "loss_aggregation": "token_mean", "overlong_buffer": 4, "overlong_factor": 0.5,
    },
    "opo": {"rollout_correction": "seq_mis", "kl_coef": 0.1, "stop_at_kl": 1000.0, "top_k": 300, "dump_step": 1},
    "one update": {
        "algorithm": "ppo", "ppo_epochs": 1, "gradient_accumulation_steps": 4, "processes": 2, "dump_step": 2,
        "loss_aggregation": "seq_mean_token_mean",  # the token mean of whitened advantages is 0
    },
}  # fmt: skip
# A new entry of ALGORITHMS or POLICY_LOSSES is covered without an entry here.
RUNS |= {name: {} for name in ALGORITHMS if name not in RUNS}
RUNS |= {
    f"policy_loss_{name}": {"algorithm": "grpo", "policy_loss": name, "clip_range": None}
    for name in POLICY_LOSSES if name not in {settings.get("policy_loss") for settings in RUNS.values()}
}  # fmt: skip
EVERYWHERE = {"missing_eos_penalty", "per_device_training_batch_size", "ppo_epochs", "algorithm"}


@pytest.fixture(scope="module")
def materials(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("materials")
    write_materials(folder, tiny_tokenizer)
    (folder / "reward.py").write_text(REWARD)
    write_rows(folder / "texts.jsonl", [{"text": "the sum of 17 and 4 is 21."}] * 16)
    return folder


@pytest.fixture
def run(programs, materials, tmp_path):
    """run(name, **settings) runs step 3 into tmp_path/name, repeatedly; returns its output."""

    def once(name: str, *, processes: int = 1, code: int | None = 0, fail: str = "", **settings) -> str:
        def placed(value: Any) -> Any:
            if isinstance(value, list):
                return [placed(each) for each in value]
            return value.replace("{materials}", str(materials)) if isinstance(value, str) else value

        settings = {"num_samples_per_prompt": 2, "eval_interval": 1} | settings
        argv = flags("ppo", materials, tmp_path / name, processes=processes,
                     **{key: placed(value) for key, value in settings.items()})  # fmt: skip
        log = tmp_path / f"log-{len(list(tmp_path.glob('log-*')))}"
        return programs.run(MAINS["ppo"], argv, processes=processes, log=log, code=code,
                            environment={"DSCHAT_FAILPOINT": fail})  # fmt: skip

    return once


def test_the_runs_cover_every_flag_and_every_choice():
    for group in (PPOArguments, RewardArguments, EvaluationArguments):
        hints = get_type_hints(group)
        for field in fields(group):
            tried = [({"algorithm": name} | settings).get(field.name) for name, settings in RUNS.items()]
            choices = [
                kind for kind in (hints[field.name], *get_args(hints[field.name])) if get_origin(kind) is Literal
            ]
            names = field.metadata["choices"] or (get_args(choices[0]) if choices else ())
            if names:
                assert set(names) == set(tried) - {None}, field.name
            elif field.name not in EVERYWHERE:
                default = field.default if field.default is not MISSING else field.default_factory()
                assert any(value not in (None, default) for value in tried), field.name


@pytest.mark.parametrize("name", RUNS)
def test_every_algorithm_trains_with_finite_metrics_and_a_loadable_export(name, run, tmp_path):
    settings = {"algorithm": name} | RUNS[name]
    output = run(name, **settings)
    assert "has no effect" not in output
    folder, algorithm = tmp_path / name, settings["algorithm"]
    lines = metrics_of(folder)
    assert [(line["phase"], line["step"]) for line in lines] == [
        ("eval", 0), ("train", 1), ("eval", 1), ("train", 2), ("eval", 2)
    ]  # fmt: skip
    for line in lines:
        assert all(value is not None for value in line.values()), line
    train = lines[1::2]
    assert all(line["policy_loss"] != 0 and line["actor_grad_norm"] > 0 for line in train)
    assert ("value_loss" in train[0]) == (algorithm == "ppo") == (folder / "critic").exists()
    ppo = PPOArguments(
        algorithm, **{key: settings[key] for key in ("kl_coef", "kl_in", "kl_target") if key in settings}
    )
    assert ("kl" in train[0]) == (ppo.needs_reference or "stop_at_kl" in settings)
    assert ("kl_loss" in train[1]) == (ppo.kl_in == "loss")
    assert ("correction_weight" in train[0]) == (settings.get("rollout_correction", "none") != "none")
    n = settings.get("eval_num_samples", 1)
    assert (n > 1) == ({f"mean@{n}", f"pass@{n}", f"maj@{n}"} <= lines[0].keys())
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    if "best_metric" in settings:
        assert_best_is_recorded(folder, settings["best_metric"], settings.get("best_mode", "max"))
    if "dump_step" in settings:
        replay = MAINS["ppo"].parents[2] / "scripts" / "replay.py"
        (dump,) = (folder / "dump").iterdir()
        replayed = subprocess.run([sys.executable, replay, dump], capture_output=True, text=True)
        text = replayed.stdout + replayed.stderr
        assert replayed.returncode == 0 and "the replay equals the run" in text, text


def assert_best_is_recorded(output: Path, metric: str, mode: str) -> int:
    """best.json records the first of the best evaluations; returns its step."""
    evaluations = [(line["step"], line[metric]) for line in metrics_of(output) if line["phase"] == "eval"]
    value = (max if mode == "max" else min)(value for _, value in evaluations)
    step = next(step for step, other in evaluations if other == value)
    best = json.loads((output / "best" / "best.json").read_text())
    assert best == {"step": step, metric: pytest.approx(value)}
    assert not (output / "best.unfinished").exists()
    return step


ALL = {
    "algorithm": "grpo", "reward": ["{materials}/reward.py:some", "{materials}/reward.py:level@0.3"],
    "normalize_rewards": True,
    "kl_target": 1e-4, "kl_horizon": 100.0, "ref_refresh_interval": 2, "dynamic_sampling": 2, "eval_num_samples": 2,
    "best_metric": "pass@2", "max_steps": 4, "reward_model_name_or_path": None, "lr_scheduler_type": "constant",
    "actor_learning_rate": 1e-2,
}  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(programs, materials, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("unbroken")
    settings = json.loads(json.dumps(ALL).replace("{materials}", str(materials)))
    argv = flags("ppo", materials, output, num_samples_per_prompt=2, eval_interval=1, **settings)
    programs.run(MAINS["ppo"], argv, log=output / "log.txt")
    return output


def assert_same(output: Path, unbroken: Path) -> None:
    assert metrics_of(output) == metrics_of(unbroken)
    assert (output / "samples.jsonl").read_text() == (unbroken / "samples.jsonl").read_text()
    assert (output / "best" / "best.json").read_text() == (unbroken / "best" / "best.json").read_text()
    for folder in ("", "best"):
        actual, expected = weights_of(output / folder), weights_of(unbroken / folder)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected), folder


@pytest.mark.parametrize(
    ("fail", "save_interval", "code"),
    [
        ("update:TERM#6", 0, SAVED),  # after two updates of the second iteration
        ("update:TERM#16", 0, SAVED),  # between two iterations, with a refreshed reference
        ("rollout#12", 1, -signal.SIGKILL),  # in a rollout, perhaps of a later round
        ("update#14", 1, -signal.SIGKILL),
    ],
)
def test_a_killed_and_resumed_run_restores_all_state(fail, save_interval, code, run, unbroken, tmp_path):
    lines = [line for line in metrics_of(unbroken) if line["phase"] == "train"]
    kl_coefs = [line["kl_coef"] for line in lines]
    assert len(set(kl_coefs)) == 4 and min(line["responses"] for line in lines) > 16, "every option has an effect"
    run("run", **ALL, fail=fail, code=code, save_interval=save_interval)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    output = run("run", **ALL, resume="auto", save_interval=save_interval)
    assert "resuming from" in output and newest_checkpoint(tmp_path / "run") is not None
    assert_same(tmp_path / "run", unbroken)


def test_the_kl_coefficient_adapts_and_a_refreshed_reference_resets_kl(unbroken):
    lines = [line for line in metrics_of(unbroken) if line["phase"] == "train"]
    kl_coef = 0.04
    for line in lines:
        assert line["kl_coef"] == pytest.approx(kl_coef)
        share = min(line["responses"] / 100.0, 1.0)
        kl_coef *= 1 + min(max(line["kl"] / 1e-4 - 1, -0.2), 0.2) * share
    assert lines[0]["kl"] == lines[2]["kl"] == 0 and lines[1]["kl"] > 0 and lines[3]["kl"] > 0


def test_the_best_model_is_the_one_that_was_evaluated_as_best(run, unbroken, tmp_path):
    step = assert_best_is_recorded(unbroken, "pass@2", "max")
    assert 0 < step < 4, "a best model at the start or the end would prove little"
    run("run", **ALL | {"max_steps": step})
    actual, expected = weights_of(tmp_path / "run"), weights_of(unbroken / "best")
    assert all(torch.equal(actual[name], expected[name]) for name in actual) and actual.keys() == expected.keys()


@pytest.mark.parametrize(("settings", "message"), [
    ({"best_metric": "accuracy"}, "--best_metric accuracy: the evaluation has no such metric; it has"),
    ({"best_metric": "score", "eval_fraction": 0.0}, "it has none, since there are no held-out rows"),
])  # fmt: skip
def test_a_best_metric_that_no_evaluation_has_ends_the_run_before_it_trains(settings, message, run, tmp_path):
    output = run("run", code=2, **settings)
    assert message in output and "Traceback" not in output
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_reward_model_that_reads_the_actors_ids_needs_positions_for_all_of_them(programs, tmp_path, tiny_tokenizer):
    write_materials(tmp_path, tiny_tokenizer)
    for name in ("reward", "other_reward"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    settings = {"algorithm": "grpo", "num_samples_per_prompt": 2, "max_steps": 1}
    output = programs.run(
        MAINS["ppo"], flags("ppo", tmp_path, tmp_path / "run", **settings), log=tmp_path / "log", code=2
    )
    assert f"{tmp_path / 'reward'} has 16 positions" in output and "= 32 tokens" in output
    # With a tokenizer of its own it reads the end of a conversation that is too long.
    argv = flags("ppo", tmp_path, tmp_path / "run", **settings, reward_model_name_or_path=tmp_path / "other_reward")
    programs.run(MAINS["ppo"], argv, log=tmp_path / "log-2")
