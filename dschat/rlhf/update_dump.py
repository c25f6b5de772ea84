"""Dumps inputs and outputs of one step-3 update to files; scripts/replay.py recomputes the update and compares."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dschat.checkpoints.write_errors import WriteErrors
from dschat.distributed import collectives, failpoint
from dschat.models.weights import ExportError, export_model
from dschat.rlhf.iteration import Iteration
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer

CONTENT = "the dump of --dump_step"


def dump_inputs(folder: Path, trainer: DeepSpeedPPOTrainer, iteration: Iteration) -> bool:
    """Write actor, critic and this iteration's minibatches before its first update. A collective.

    folder/actor and folder/critic (if there is one) are plain Hugging Face folders with adapters merged;
    iteration_rank*.safetensors hold the fields of Experience for each minibatch; settings.json the update's flags.

    Returns: whether it could be written; if not, the folder is removed with a warning.
    """
    errors = WriteErrors(folder, content=CONTENT)
    try:
        errors.attempt(lambda: folder.mkdir(parents=True, exist_ok=True))
        errors.raise_on_all_ranks()
        for name, engine in trainer.engine.trained.items():
            export_model(engine.module.model, folder / name, trainer.tokenizer)
        errors.attempt(lambda: _write_iteration(folder, trainer, iteration))
        errors.raise_on_all_ranks()
    except (OSError, ExportError) as error:
        _warn_and_remove(folder, error)
        return False
    return True


def _write_iteration(folder: Path, trainer: DeepSpeedPPOTrainer, iteration: Iteration) -> None:
    """Write this rank's minibatches, and on the main rank the settings."""
    failpoint.reached("dump_inputs")
    iteration.save(folder)
    if collectives.is_main():
        settings = {
            "processes": collectives.world_size(), "temperature": trainer.rollouts.temperature,
            "max_answer_seq_len": trainer.rollouts.max_answer_seq_len, "kl_coef": trainer.kl_coef,
            "ppo": asdict(trainer.ppo),
        }  # fmt: skip
        (folder / "settings.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _warn_and_remove(folder: Path, error: Exception) -> None:
    """Warn that the dump is incomplete, and remove what was written: scripts/replay.py needs all of it."""
    if collectives.is_main():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"warning: {error}. The run continues without the dump", file=sys.stderr, flush=True)


class UpdateDump:
    """Records the tensors that an update's losses compute on this rank, then writes them.

    update_rank*.safetensors: "logprobs" and "values" [B, T] of the minibatch, 0 in rows that are not trained on;
    "policy_loss" (KL and entropy included where the loss has them) and "value_loss", sums over micro-batches.

    Args:
        shape: [B, T] of the minibatch's responses.
    """

    def __init__(self, folder: Path, shape: torch.Size) -> None:
        self.folder, self.shape, self.tensors = folder, shape, {}

    def record(self, rows: Sequence[int], name: str, tensor: Tensor) -> None:
        """Add a micro-batch's tensor: a scalar to the sum, others to their rows."""
        tensor = tensor.detach()
        if tensor.dim() == 0:
            self.tensors[name] = self.tensors.get(name, 0.0) + tensor
        elif rows:
            whole = self.tensors.setdefault(name, tensor.new_zeros(self.shape))
            whole[list(rows), : tensor.shape[1]] = tensor

    def write(self, metrics: Mapping[str, float]) -> None:
        """Write the recorded tensors, and on the main rank the update's metrics. A collective.

        If a rank cannot write them, the dump is removed with a warning.
        """
        errors = WriteErrors(self.folder, content=CONTENT)
        errors.attempt(lambda: self._write(metrics))
        try:
            errors.raise_on_all_ranks()
        except OSError as error:
            _warn_and_remove(self.folder, error)

    def _write(self, metrics: Mapping[str, float]) -> None:
        failpoint.reached("dump_update")
        save_file({name: tensor.contiguous().cpu() for name, tensor in self.tensors.items()},
                  self.folder / f"update_rank{collectives.rank()}.safetensors")  # fmt: skip
        if collectives.is_main():
            finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            (self.folder / "metrics.json").write_text(json.dumps(finite, indent=1), encoding="utf-8")
