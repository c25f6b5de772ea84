"""Reference log-probs for every row of a run: computed once, cached on disk, after which the model is freed.

The policy starts as the reference, so before the first update every log-ratio is exactly 0. The low bits of a row's
log-prob depend on padding and on the other rows of its forward pass, so the reference is evaluated on the same
micro-batches as training's first epoch (and as evaluation). Hence another split into micro-batches (world size,
micro-batch size, seed) needs another cache file, which differs by rounding. From the second epoch on micro-batches
are reshuffled, and the policy's low bits differ.

The cache is a folder `reference-<fingerprint>` beside the prepared rows; the fingerprint covers weights, rows, split,
precision and device. One that does not match its manifest is computed again (see verified_folder).
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from datasets import Dataset
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from dschat import arguments
from dschat.arguments.command_line import as_settings_errors
from dschat.checkpoints.verified_folder import written_folder
from dschat.data.arrow import content_digest, is_prepared
from dschat.data.datasets import DataSplits
from dschat.data.micro_batches import limit_of
from dschat.distributed import collectives, groups, watchdog
from dschat.distributed.deepspeed_config import frozen_config
from dschat.distributed.engines import frozen_engine
from dschat.models.weight_files import weights_digest
from dschat.runs.fit import Batch, Objective, collated, evaluation_steps, forward_tokens, schedule, share

ResponseLogprobs = Callable[[deepspeed.DeepSpeedEngine, Batch], torch.Tensor]
_TABLES = "logprobs.safetensors"


@dataclass(frozen=True)
class BatchPlan:
    """Row indices of each batch over all ranks, and how it is cut into micro-batches."""

    steps: list[list[int]]
    rows_per_device: int
    max_tokens: int


def with_reference_logprobs(
    splits: DataSplits, objective: Objective, *, response_logprobs: ResponseLogprobs,
    load: Callable[[dict[str, Any]], nn.Module], path: str, folder: str, settings: arguments.PreferenceSettings,
) -> DataSplits:  # fmt: skip
    """Add a column `ref_logprobs` to the splits: [rows, 2] in nats, NaN for rows that this run never uses.

    Args:
        response_logprobs: (engine, micro-batch) → [B, 2] float32, without gradient.
        load: DeepSpeed configuration → the reference network, with the weights that `path` names.
        folder: of the prepared rows.
    """
    model, devices = settings.model, settings.devices
    batches, total = schedule(splits.train, settings)
    steps = [batches.step(step) for step in range(min(total, len(batches)))]
    if total > len(batches):  # later epochs use rows left over from the first
        unused = sorted(set(range(len(splits.train))) - {row for step in steps for row in step})
        size = batches.global_batch_size
        steps += [unused[start : start + size] for start in range(0, len(unused), size)]
    eval_steps = evaluation_steps(
        splits.eval["length"][:], batch_size=model.per_device_eval_batch_size, max_batches=settings.run.eval_iters
    )
    max_tokens = devices.max_tokens_per_micro_batch
    plans = {
        "train": BatchPlan(steps, model.per_device_train_batch_size, max_tokens),
        "eval": BatchPlan(eval_steps, model.per_device_eval_batch_size, max_tokens),
    }
    watchdog.phase("reference fingerprint")
    cache = Path(folder, f"reference-{_fingerprint(path, splits, plans, devices=devices)}")
    tables = load_file(cache / _TABLES) if is_prepared(cache, verify=True) else None
    if not all(collectives.all_gather_objects(tables is not None)):
        config = frozen_config(
            dtype=devices.dtype, zero_stage=model.zero_stage, micro_batch_size=model.per_device_train_batch_size,
            world_size=groups.data_parallel_size(), offload=devices.offload and model.zero_stage == 3,
        )  # fmt: skip
        tables = _compute(splits, objective, plans, response_logprobs=response_logprobs, load=load, config=config)
        if collectives.is_main_of_node():
            with written_folder(cache) as unfinished:
                save_file(tables, unfinished / _TABLES)
        collectives.barrier()
    elif collectives.is_main():
        print(f"reference log-probs loaded from {cache}", flush=True)
    train_rows, eval_rows = (
        rows.add_column("ref_logprobs", tables[name].tolist())
        for name, rows in (("train", splits.train), ("eval", splits.eval))
    )
    return replace(splits, train=train_rows, eval=eval_rows)


@torch.no_grad()
def _compute(
    splits: DataSplits, objective: Objective, plans: dict[str, BatchPlan], *, response_logprobs: ResponseLogprobs,
    load: Callable[[dict[str, Any]], nn.Module], config: dict[str, Any],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Tables [rows, 2] float32 of both splits, the same on every rank; each rank computes its share."""
    with as_settings_errors():
        network = load(config)
    engine = frozen_engine(network, config=config)
    tables = {
        name: _logprob_table(engine, rows, objective, plans[name], response_logprobs=response_logprobs, name=name)
        for name, rows in (("train", splits.train), ("eval", splits.eval))
    }
    engine.destroy()
    del engine
    gc.collect()
    get_accelerator().empty_cache()
    return tables


def _logprob_table(
    engine: deepspeed.DeepSpeedEngine, rows: Dataset, objective: Objective, plan: BatchPlan, *,
    response_logprobs: ResponseLogprobs, name: str,
) -> torch.Tensor:  # fmt: skip
    steps, limit = plan.steps, limit_of(engine.module, rows=plan.rows_per_device, max_tokens=plan.max_tokens)
    lengths = forward_tokens(rows, padded=limit.padded)
    local_table = torch.zeros(len(rows), 2, dtype=torch.float64, device=engine.device)
    for number, step in enumerate(steps, start=1):
        for indices in share(lengths, step, limit):
            watchdog.phase("reference")
            logprobs = response_logprobs(engine, collated(objective, rows, indices, engine.device))
            local_table[indices] = logprobs[: len(indices)].double()
        if collectives.is_main() and number in (len(steps), *range(100, len(steps), 100)):
            print(f"reference log-probs of {name} rows: {number}/{len(steps)} batches", flush=True)
    table = collectives.sum_over_ranks(local_table)  # each row is computed on one rank and 0 on the others
    is_computed = torch.zeros(len(rows), dtype=torch.bool)
    is_computed[[row for step in steps for row in step]] = True
    return torch.where(is_computed[:, None], table.cpu(), torch.nan).float()


def _fingerprint(
    path: str, splits: DataSplits, plans: dict[str, BatchPlan], *, devices: arguments.DeviceArguments
) -> str:
    """Digest of everything that affects the values bitwise; the main rank reads weights and rows."""
    name = None
    if collectives.is_main():
        inputs = {
            "weights": weights_digest(path),
            "rows": [content_digest(splits.train), content_digest(splits.eval)],
            "cuts": {name: asdict(plan) for name, plan in plans.items()},
            "forward": [devices.remove_padding, devices.share_prompts, devices.compile, devices.kernels],
            "world_size": collectives.world_size(),
            "computation": [devices.dtype, get_accelerator().device_name(), torch.__version__],
        }
        name = hashlib.blake2b(json.dumps(inputs, sort_keys=True).encode(), digest_size=8).hexdigest()
    return collectives.all_gather_objects(name)[0]
