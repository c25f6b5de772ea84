"""Everything that one update of step 3 reads and makes, in files; scripts/replay.py runs it again and compares."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dschat.distributed import launch
from dschat.models.weights import export_model
from dschat.rlhf.iteration import Iteration
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer


def dump_inputs(folder: Path, trainer: DeepSpeedPPOTrainer, iteration: Iteration) -> None:
    """Write actor, critic and this iteration's minibatches as they are before its first update. A collective.

    folder/actor and folder/critic (where there is one) are plain Hugging Face folders, adapters folded in;
    iteration_rank*.safetensors hold the fields of Experience for each minibatch; settings.json the update's flags.
    """
    for name, engine in trainer.engine.trained.items():
        export_model(engine.module.model, folder / name, trainer.tokenizer)
    iteration.save(folder)
    if launch.is_main():
        settings = {
            "processes": launch.world_size(), "temperature": trainer.rollouts.temperature,
            "max_answer_seq_len": trainer.rollouts.max_answer_seq_len, "kl_coef": trainer.kl_coef,
            "ppo": asdict(trainer.ppo),
        }  # fmt: skip
        (folder / "settings.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


@contextmanager
def dumped_update(folder: Path, trainer: DeepSpeedPPOTrainer, metrics: dict[str, float]) -> Iterator[None]:
    """Inside, what an update computes is noted; afterwards it is written, with what has been put into metrics.

    update_rank*.safetensors: "logprobs.M" and "policy_loss.M" (KL and entropy included where the loss has
    them), "values.M" and "value_loss.M" of micro-batch M.
    """
    noted: dict[str, list[Tensor]] = defaultdict(list)
    trainer.note = lambda name, tensor: noted[name].append(tensor.detach().clone())
    try:
        yield
    finally:
        trainer.note = None
    tensors = {f"{name}.{part}": tensor for name, parts in noted.items() for part, tensor in enumerate(parts)}
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()},
              folder / f"update_rank{launch.rank()}.safetensors")  # fmt: skip
    if launch.is_main():
        finite = {name: value if torch.isfinite(torch.tensor(value)) else None for name, value in metrics.items()}
        (folder / "metrics.json").write_text(json.dumps(finite, indent=1), encoding="utf-8")
