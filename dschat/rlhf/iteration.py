"""State of an iteration of step 3, saved so that a run can resume in the middle of one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dschat.arguments.strict_json import read_json_object
from dschat.distributed import collectives
from dschat.distributed.engines import Metrics
from dschat.rlhf.experience import Experience
from dschat.rlhf.rollouts.result import Timings
from dschat.runs.throughput import Work


@dataclass
class Iteration:
    """This rank's part of an iteration.

    Attributes:
        minibatches: one per update; those already trained on may be None.
        sums: experience_sums of each rollout batch.
        samples: responses with their scores, for the log.
        updates: metrics of the finished updates.
        timings, work: seconds by phase, and what the updates computed; a resumed run has only those since resuming.
    """

    minibatches: list[Experience | None] = field(default_factory=list)
    sums: list[Metrics] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, float]] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    work: Work = Work()

    def save(self, folder: Path) -> None:
        """Write this rank's state, needed to resume, into its own files."""
        tensors = {
            f"{number}.{name}": tensor.contiguous()
            for number, minibatch in enumerate(self.minibatches)
            if number >= len(self.updates)
            for name, tensor in minibatch.tensors().items()
        }
        save_file(tensors, folder / f"iteration_rank{collectives.rank()}.safetensors")
        record = {
            "minibatches": len(self.minibatches),
            "sums": [{name: value.item() for name, value in sums.items()} for sums in self.sums],
            "samples": self.samples,
            "updates": self.updates,
        }
        (folder / f"iteration_rank{collectives.rank()}.json").write_text(json.dumps(record), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Iteration:
        """Load what `save` wrote on the same rank."""
        record = read_json_object(folder / f"iteration_rank{collectives.rank()}.json", constants=True)
        tensors = load_file(folder / f"iteration_rank{collectives.rank()}.safetensors", device=str(device))
        done = len(record["updates"])
        minibatches = [None] * done + [
            Experience(
                **{name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{number}.")}
            )
            for number in range(done, record["minibatches"])
        ]
        sums = [
            {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in part.items()}
            for part in record["sums"]
        ]
        return cls(minibatches, sums, record["samples"], record["updates"])
