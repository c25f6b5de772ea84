"""A run whose reward sources stop giving scores ends with a checkpoint; equal scores do not end it."""

import json
from pathlib import Path

import pytest
from rlhf_models import QUESTIONS, eval_rows, make_trainer, save_models

from dschat import arguments
from dschat.checkpoints.selection import find_checkpoint, newest_checkpoint
from dschat.data.batches import GlobalBatches
from dschat.data.datasets import DataSplits
from dschat.rlhf.experience import MinibatchShuffle, MiniDataset
from dschat.rlhf.missing_scores import MissingScores, RewardsUnavailable
from dschat.rlhf.training_loop import PPORun
from dschat.runs import signals

REWARD = """
from pathlib import Path

def service(prompts, responses, rows):
    if Path(__file__).with_name("gone").exists():
        raise ConnectionError("connection refused")
    return [float(len(response) % 3) for response in responses]

def equal(prompts, responses, rows): return [1.0] * len(responses)
"""


pytestmark = pytest.mark.usefixtures("single_rank_group")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def fit(models: Path, folder: Path, function: str, *, iterations: int, max_bad_steps: int, resume=None) -> list[dict]:
    """Run step 3's loop; returns the lines of metrics.jsonl."""
    (folder / "reward.py").write_text(REWARD)
    trainer = make_trainer(
        models, algorithm="grpo", num_samples_per_prompt=2, kl_coef=0.0, reward_model_name_or_path=None,
        reward=[f"{folder / 'reward.py'}:{function}"],
    )  # fmt: skip
    rows = eval_rows(trainer, QUESTIONS)
    output = folder / "run"
    output.mkdir(exist_ok=True)
    run = PPORun(
        trainer=trainer,
        dataset=MiniDataset(
            MinibatchShuffle(minibatch_size=8, rank=0, world_size=1, seed=5, group_size=2), generation_batches=1,
            ppo_epochs=1, whiten_advantages=False,
        ),
        prompts=DataSplits(train=rows, eval=rows.select([]), report=None),
        batches=GlobalBatches([1] * len(rows), global_batch_size=4, seed=3, group_by_length=False),
        unsupervised=None, iterations=iterations, updates_per_iteration=1,
        settings=arguments.RLHFSettings(
            ppo=trainer.ppo, rollouts=trainer.rollouts,
            run=arguments.RunArguments(output_dir=str(output), max_bad_steps=max_bad_steps),
        ),
    )  # fmt: skip
    with signals.capture_signals() as signal_flag:
        run.fit(resume, signal_flag)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_an_unavailable_reward_service_ends_the_run_with_a_checkpoint_from_which_it_resumes(models, tmp_path, capsys):
    (tmp_path / "gone").touch()
    with pytest.raises(RewardsUnavailable) as ended:
        fit(models, tmp_path, "service", iterations=4, max_bad_steps=2)
    newest = newest_checkpoint(str(tmp_path / "run"))
    assert ended.value.code == 1 and newest is not None
    message = capsys.readouterr().out
    assert "no response of the last 2 iterations got a score (--max_bad_steps 2)" in message
    assert f"--reward {tmp_path / 'reward.py'}:service gave none" in message and str(newest) in message
    (tmp_path / "gone").unlink()
    resumed = find_checkpoint(str(tmp_path / "run"), "auto")
    lines = fit(models, tmp_path, "service", iterations=4, max_bad_steps=2, resume=resumed)
    assert [(line["step"], line.get("scored", 1.0)) for line in lines] == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0)]
    assert [line.get("updates_without_signal", 0) for line in lines[:2]] == [1, 1]


def test_equal_scores_in_every_group_never_end_a_run(models, tmp_path):
    lines = fit(models, tmp_path, "equal", iterations=3, max_bad_steps=1)
    assert [line["flat_groups"] for line in lines] == [1.0] * 3 and not any("scored" in line for line in lines)


def test_only_consecutive_iterations_without_any_score_count():
    sources = {"service": "https://me:secret@host/score", "format": "format"}
    missing = MissingScores(limit=2, sources=sources)
    gone = {"scored": 0.0, "reward_service_missing": 8.0}
    assert [missing.check_metrics(metrics) for metrics in (gone, {"scored": 0.25}, gone, {}, gone)] == [None] * 5
    reason = missing.check_metrics(gone)
    assert "--reward https://***@host/score gave none" in reason and "format" not in reason
    unlimited = MissingScores(limit=0, sources=sources)
    assert not any(unlimited.check_metrics(gone) for _ in range(50))
