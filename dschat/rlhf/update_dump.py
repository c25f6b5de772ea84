"""Dumps inputs and outputs of one step-3 update to files; scripts/replay.py recomputes the update and compares."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from dschat.distributed import collectives
from dschat.models.weights import export_model
from dschat.rlhf.iteration import Iteration
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer


def dump_inputs(folder: Path, trainer: DeepSpeedPPOTrainer, iteration: Iteration) -> None:
    """Write actor, critic and this iteration's minibatches before its first update. A collective.

    folder/actor and folder/critic (if there is one) are plain Hugging Face folders with adapters merged;
    iteration_rank*.safetensors hold the fields of Experience for each minibatch; settings.json the update's flags.
    """
    for name, engine in trainer.engine.trained.items():
        export_model(engine.module.model, folder / name, trainer.tokenizer)
    iteration.save(folder)
    if collectives.is_main():
        settings = {
            "processes": collectives.world_size(), "temperature": trainer.rollouts.temperature,
            "max_answer_seq_len": trainer.rollouts.max_answer_seq_len, "kl_coef": trainer.kl_coef,
            "ppo": asdict(trainer.ppo),
        }  # fmt: skip
        (folder / "settings.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


class UpdateDump:
    """Records the tensors that an update's losses compute on this rank, then writes them.

    update_rank*.safetensors: "logprobs.M" and "policy_loss.M" (KL and entropy included where the loss has
    them), "values.M" and "value_loss.M" of micro-batch M.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.tensors = folder, defaultdict(list)

    def record(self, name: str, tensor: Tensor) -> None:
        """Append a copy of the next micro-batch's tensor under this name."""
        self.tensors[name].append(tensor.detach().clone())

    def write(self, metrics: Mapping[str, float]) -> None:
        """Write the recorded tensors, and on the main rank the update's metrics."""
        tensors = {f"{name}.{part}": x for name, parts in self.tensors.items() for part, x in enumerate(parts)}
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()},
                  self.folder / f"update_rank{collectives.rank()}.safetensors")  # fmt: skip
        if collectives.is_main():
            finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            (self.folder / "metrics.json").write_text(json.dumps(finite, indent=1), encoding="utf-8")
