"""Long work counts as progress, so that the watchdog does not end a run that is merely slow."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tiny_models import tiny_causal_lm
from tiny_models import tiny_tokenizer as make_tokenizer

from dschat.checkpoints.verified_folder import digests
from dschat.data.arrow import content_digest
from dschat.distributed import watchdog
from dschat.generation import HybridEngine
from dschat.models.causal_lm import load_causal_lm
from dschat.models.weight_files import weights_digest
from dschat.models.weights import export_model
from dschat.rewards.retry import call_with_timeout

MIB = 1 << 20


class Reports:
    """Stands in for this rank's watchdog."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.progress = 0

    def enter_phase(self, phase: str) -> None:
        self.phases.append(phase)

    def advance(self) -> None:
        self.progress += 1


@pytest.fixture
def reports(monkeypatch) -> Reports:
    reports = Reports()
    monkeypatch.setattr(watchdog, "_current", reports)
    return reports


def sparse_file(path: Path, size: int) -> Path:
    path.touch()
    os.truncate(path, size)
    return path


def test_checksums_of_a_checkpoint_count_every_mebibyte(reports, tmp_path):
    sparse_file(tmp_path / "optim_states.pt", 5 * MIB)
    digests(tmp_path)
    assert reports.progress >= 5


def test_the_digest_of_a_reference_model_counts_every_block(reports, tmp_path):
    sparse_file(tmp_path / "model.safetensors", 65 * MIB)
    weights_digest(str(tmp_path))
    assert reports.progress >= 4


def test_the_fingerprint_of_the_data_counts_every_batch_of_rows(reports):
    content_digest(Dataset.from_dict({"x": list(range(10_000))}))
    assert reports.progress == 3


def test_loading_and_exporting_a_model_count_its_weights(reports, tmp_path):
    model = tiny_causal_lm("llama")
    tensors = len(list(model.parameters()))
    model.save_pretrained(tmp_path / "model")
    loaded = load_causal_lm(tmp_path / "model", dtype=torch.float32)
    assert reports.phases == ["model loading"] and reports.progress >= tensors // 2
    before = reports.progress
    export_model(loaded, tmp_path / "export", make_tokenizer())
    assert reports.phases[-1] == "export" and reports.progress - before >= tensors


def test_a_rollout_counts_its_decoding_steps(reports):
    actor = HybridEngine(tiny_causal_lm("llama"))
    with actor.generation():
        actor.generate([[5, 6, 7]], max_new_tokens=12, eos_token_ids=None, pad_token_id=0, seed=1)
    assert reports.progress >= 12


def test_waiting_for_a_reward_function_counts_while_its_time_limit_runs(reports):
    call_with_timeout(lambda: time.sleep(0.2) or 1.0, seconds=5)
    assert reports.progress >= 1


def test_a_growing_folder_counts_and_one_that_stopped_growing_does_not(reports, monkeypatch, tmp_path):
    monkeypatch.setattr(watchdog, "FOLDER_POLL_SECONDS", 0.02)
    with watchdog.watch_folder(tmp_path):
        for size in (1, 2, 3):
            before, deadline = reports.progress, time.monotonic() + 60
            sparse_file(tmp_path / "file", size)
            while reports.progress == before:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        before = reports.progress
        time.sleep(0.2)
        assert reports.progress == before
