"""Reward functions and services that run in a background thread while the models run."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rlhf_models import make_trainer, prompts_of, save_models

from dschat.distributed import watchdog
from dschat.generation import Rollout
from dschat.rewards.retry import NoScores, RetryPolicy
from dschat.rewards.weighted_sum import ResponseBatch, Rewards, parse_reward

pytestmark = pytest.mark.usefixtures("single_rank_group")

FUNCTIONS = """
import random
import threading

started, forward_ran = threading.Event(), threading.Event()
calls = []

def concurrent(responses):
    started.set()
    assert forward_ran.wait(60)
    return [1.0 for _ in responses]

def lengths(responses):
    calls.append("lengths")
    return [float(len(response)) for response in responses]

def noise(responses):
    calls.append("noise")
    return [random.random() for _ in responses]

def partly(responses):
    calls.append("partly")
    if list(responses) != ["a"]:
        raise ZeroDivisionError("no such score")
    return [1.0]

def fails(responses):
    calls.append("fails")
    raise ZeroDivisionError("no such score")
"""
RESPONSES = ["a", "bcd", "ef"]


@pytest.fixture
def functions(tmp_path, request) -> Path:
    path = tmp_path / f"{request.node.originalname}.py"
    path.write_text(FUNCTIONS)
    return path


def module_of(functions: Path) -> SimpleNamespace:
    return sys.modules[f"judge_{functions.stem}"]


def batch_of() -> ResponseBatch:
    messages = [[{"role": "user", "content": "?"}]] * 3
    return ResponseBatch(messages, RESPONSES, [[1]] * 3, [{}] * 3, [True] * 3, max_tokens=8)


def rollout_of() -> Rollout:
    ids, mask = torch.ones(3, 2, dtype=torch.long), torch.ones(3, 2, dtype=torch.bool)
    return Rollout(ids, mask, mask[:, 1:], torch.zeros(3, 1), torch.ones(3, dtype=torch.bool))


def rewards_of(functions: Path, *names: str, max_failed_calls: int | None = None) -> Rewards:
    policy = RetryPolicy(seconds=60.0, retries=0, max_failed_calls=max_failed_calls)
    return Rewards([parse_reward(f"{functions}:{name}") for name in names], normalize=False, retry_policy=policy)


def test_functions_run_while_the_models_run(functions, tmp_path):
    """The function waits for a forward pass of the reference model, which waits for the function to start."""
    models = save_models(tmp_path / "models")
    trainer = make_trainer(models, reward=[f"{functions}:concurrent"], reward_model_name_or_path=None)
    module = module_of(functions)
    in_time = []
    trainer.engine.ref.module.register_forward_pre_hook(lambda *_: in_time.append(module.started.wait(60)))
    trainer.engine.ref.module.register_forward_hook(lambda *_: module.forward_ran.set())
    experience = trainer.generate_experience(prompts_of(trainer))
    assert in_time and all(in_time)
    assert (experience.scores == 1).all() and experience.has_score.all()


def test_scoring_forward_passes_draw_no_random_numbers(tmp_path):
    """So a function that draws from a global generator gets the same numbers before, beside and after them."""
    trainer = make_trainer(save_models(tmp_path, "gpt2", dropout=0.5))
    prompts = prompts_of(trainer)
    rollout = trainer.generate(prompts, trainer.sampling, iteration=0, sample_ids=prompts["row_index"])
    trainer.engine.policy.train()
    state = torch.get_rng_state()
    trainer.model_outputs(rollout)
    assert torch.equal(torch.get_rng_state(), state)


def test_scores_and_order_of_calls_are_those_of_calls_in_turn(functions):
    import random

    rewards = rewards_of(functions, "noise", "lengths", "noise", "partly")
    results = []
    for start in (False, True):
        random.seed(5)
        batch = batch_of()
        results.append(rewards.score(rollout_of(), batch, pending=rewards.start(batch) if start else None))
    in_turn, started = results
    assert list(started.parts) == list(in_turn.parts) == ["noise", "lengths", "noise_2", "partly"]
    torch.testing.assert_close(started.parts, in_turn.parts, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(started.total, in_turn.total) and torch.equal(started.has_score, in_turn.has_score)
    assert started.parts["lengths"].tolist() == [1, 3, 2]
    calls = module_of(functions).calls
    assert calls[:3] == ["noise", "lengths", "noise"] and calls[: len(calls) // 2] == calls[len(calls) // 2 :]


def test_errors_are_raised_in_the_waiting_thread_with_the_message_and_traceback_of_the_function(functions, capsys):
    raised, warnings = [], []
    for start in (False, True):
        rewards, batch = rewards_of(functions, "fails", "lengths", max_failed_calls=1), batch_of()
        pending = rewards.start(batch) if start else None
        with pytest.raises(NoScores, match="ZeroDivisionError: no such score") as error:
            rewards.score(rollout_of(), batch, pending=pending)
        raised.append(str(error.value))
        warnings.append(capsys.readouterr().err)
        assert any(entry.name == "scores" and entry.path.name == "retry.py" for entry in error.traceback)
    assert raised[0] == raised[1] and warnings[0] == warnings[1] != ""
    assert "lengths" not in module_of(functions).calls  # sources after the failed one are not called


def test_progress_of_the_background_thread_counts_only_while_it_is_awaited(monkeypatch):
    counted = []
    monkeypatch.setattr(watchdog, "_current", SimpleNamespace(advance=lambda: counted.append(1)))
    awaited = threading.Event()
    with watchdog.progress_only_while(awaited):
        watchdog.progress()
        assert not counted
        awaited.set()
        watchdog.progress()
        assert len(counted) == 1
    awaited.clear()
    watchdog.progress()
    assert len(counted) == 2
