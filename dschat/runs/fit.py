"""The training loop that steps 1 and 2 share: engine, resume, epochs of global batches, evaluation, checkpoints."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import deepspeed
import numpy as np
import pyarrow.compute
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from dschat import arguments
from dschat.arguments.command_line import as_settings_errors
from dschat.checkpoints.selection import find_checkpoint
from dschat.data.batches import GlobalBatches
from dschat.data.datasets import DataSplits
from dschat.data.micro_batches import MicroBatchLimit, StepRows, limit_of, prompt_lengths_in
from dschat.data.mismatched import FORWARD_TOKENS
from dschat.distributed import collectives, failpoint, groups, launch, watchdog
from dschat.distributed.engines import Metrics, optimizer_step, sum_metrics
from dschat.models.weights import export_model
from dschat.runs.best_model import check_evaluation_rows
from dschat.runs.session import ResumePoint, TrainingSession, data_fingerprint
from dschat.runs.signals import SignalFlag
from dschat.runs.throughput import TrainedModel, Work, throughput_metrics, trained_model
from dschat.runs.trainable import ModelHyperparameters, build_trainable

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The parts of the training loop in which SFT, reward model and preference training differ.

    Attributes:
        collate: rows → tensors of a micro-batch; no rows → a dummy micro-batch with count 0.
        count: number of items in a micro-batch that the loss is averaged over: trained tokens, or pairs.
        loss_of: (engine, micro-batch, count of the global batch) → loss and metrics, both divided by that count.
        evaluation: sums over the evaluation set (of loss_of with a count of 1, and "count") → metrics.
        verify: called once with the engine, on all ranks; raises ValueError if the objective cannot train this model.
        prepare: (engine, this rank's micro-batches of a step or of an evaluation) → the same, with tensors added that
            are computed over all of them, or without gradient; a collective.
    """

    collate: Callable[[list], Batch]
    count: Callable[[Batch], torch.Tensor]
    loss_of: Callable[[deepspeed.DeepSpeedEngine, Batch, float], tuple[torch.Tensor, Metrics]]
    evaluation: Callable[[Mapping[str, float]], dict[str, float]]
    verify: Callable[[deepspeed.DeepSpeedEngine], None] | None = None
    prepare: Callable[[deepspeed.DeepSpeedEngine, Iterable[Batch]], Iterable[Batch]] = lambda _, batches: batches


def schedule(rows: Dataset, settings: arguments.OneModelSettings) -> tuple[GlobalBatches, int]:
    """The global batches, and the number of steps. Raises SettingsError if there are too few rows for one step."""
    run = settings.run
    per_rank = settings.model.per_device_train_batch_size * settings.optimizer.gradient_accumulation_steps
    with as_settings_errors():
        size = per_rank * groups.data_parallel_size()
        batches = GlobalBatches(rows["length"], global_batch_size=size, seed=run.seed)
    return batches, run.max_steps or run.num_train_epochs * len(batches)


def fit(
    name: str,
    splits: DataSplits,
    objective: Objective,
    *,
    load: Callable[[dict[str, Any]], nn.Module],
    settings: arguments.OneModelSettings,
    tokenizer: PreTrainedTokenizerBase,
    signal_flag: SignalFlag,
) -> deepspeed.DeepSpeedEngine:
    """Train one model to the end of the run, from scratch or from a checkpoint; evaluate before, during and after.

    Args:
        name: name of the step, for log and console.
        load: builds the network, given the DeepSpeed configuration.
        tokenizer: exported with the best model.
        signal_flag: its handlers are installed before the first step, and are still installed when this returns.
    """
    model, run = settings.model, settings.run
    with as_settings_errors():
        check_evaluation_rows(run, len(splits.eval))
    batches, total_steps = schedule(splits.train, settings)
    with as_settings_errors():
        checkpoint = find_checkpoint(run.output_dir, run.resume)
    engine = build_engine(load, objective, settings, total_steps=total_steps)
    session = TrainingSession(
        name, settings=settings, engines={"model": engine}, total_steps=total_steps, signal_flag=signal_flag,
        resume=ResumePoint(checkpoint=checkpoint, fingerprint=data_fingerprint(batches, splits.train)),
    )  # fmt: skip
    session.log.info(
        f"{total_steps} steps of {batches.global_batch_size} rows, {batches.dropped_per_epoch} rows dropped per epoch"
    )

    max_tokens = settings.devices.max_tokens_per_micro_batch
    limit = row_limit(engine, splits.train, rows_per_device=model.per_device_train_batch_size, max_tokens=max_tokens)
    trained = trained_model(engine, limit)
    lengths = forward_tokens(splits.train, padded=limit.padded)
    longest = max(lengths)
    if 0 < max_tokens < longest:
        session.log.info(
            f"--max_tokens_per_micro_batch {max_tokens}: the longest row has {longest} tokens and is a micro-batch of "
            f"its own: {longest} or more is a limit that always holds"
        )

    def evaluate(step: int) -> None:
        metrics = evaluation(
            engine, splits.eval, objective, max_batches=run.eval_iters,
            limit=row_limit(
                engine, splits.eval, rows_per_device=model.per_device_eval_batch_size, max_tokens=max_tokens
            ),
        )  # fmt: skip
        session.log_evaluation(
            step, metrics, export=lambda folder: export_model(engine.module.model, folder, tokenizer)
        )

    with session:
        if session.evaluates_first:
            evaluate(session.first_step)
        for step in range(session.first_step, total_steps):
            watchdog.phase("update")
            failpoint.reached("update")
            done = step + 1
            metrics = train_step(engine, objective, splits.train, share(lengths, batches.step(step), limit), trained)
            session.log.metrics(done, metrics | {"epoch": done / len(batches)})
            session.health.check_metrics(done, metrics, skipped=["skipped_updates" in metrics])
            if session.evaluation_is_due(done):
                evaluate(done)
            session.save_if_due(done)
    return engine


def build_engine(
    load: Callable[[dict[str, Any]], nn.Module], objective: Objective, settings: arguments.OneModelSettings, *,
    total_steps: int,
) -> deepspeed.DeepSpeedEngine:  # fmt: skip
    """Build the engine of the trained model, validate the objective for it, and seed the ranks apart."""
    model = settings.model
    engine = build_trainable(
        load,
        ModelHyperparameters(
            learning_rate=model.learning_rate, weight_decay=model.weight_decay, zero_stage=model.zero_stage,
            lora_dim=model.lora_dim,
        ),
        micro_batch_size=model.per_device_train_batch_size,
        total_steps=total_steps,
        optimizer=settings.optimizer,
        lora=settings.lora,
        devices=settings.devices,
    )  # fmt: skip
    if objective.verify is not None:
        with as_settings_errors():
            objective.verify(engine)
    # Same initial weights on all ranks, different dropout masks.
    launch.seed_all(settings.run.seed + collectives.rank())
    return engine


def train_step(
    engine: deepspeed.DeepSpeedEngine,
    objective: Objective,
    rows: Dataset,
    micro_batches: Sequence[Sequence[int]],
    model: TrainedModel,
) -> dict[str, float]:
    """One optimizer step over the row indices of this rank's micro-batches. Returns metrics over all ranks."""
    start = time.perf_counter()
    parts = (collated(objective, rows, part, engine.device) for part in micro_batches)
    batches = list(objective.prepare(engine, parts))
    counted = sum(objective.count(batch) for batch in batches)
    # An empty part is a dummy micro-batch, which only keeps the ranks in step.
    real = [batch for part, batch in zip(micro_batches, batches, strict=True) if part]
    local = sum((model.work(sequences_of(batch, model.limit)) for batch in real), Work()).tensor(engine.device)
    count, *sums = collectives.sum_over_ranks(torch.cat([counted.double().view(1), local])).tolist()
    metrics = optimizer_step(engine, [partial(objective.loss_of, engine, batch, count) for batch in batches])
    work = Work(*sums)
    metrics["sequence_length"] = work.tokens / max(work.sequences, 1.0)
    return metrics | throughput_metrics(work, seconds=time.perf_counter() - start, engine=engine)


def sequences_of(batch: Batch, limit: MicroBatchLimit) -> StepRows:
    """The sequences of a micro-batch; of packed rows each conversation."""
    mask = batch["attention_mask"]
    if "packed_positions" not in batch:
        return limit.step_rows(batch["input_ids"], mask, prompt_lengths_in(batch))
    conversations = (batch["packed_positions"] == 0)[mask].cumsum(0) - 1
    return StepRows(conversations.bincount().tolist())


@torch.no_grad()
def evaluation(
    engine: deepspeed.DeepSpeedEngine, rows: Dataset, objective: Objective, *, limit: MicroBatchLimit, max_batches: int
) -> dict[str, float]:
    """Evaluate the objective over the evaluation rows of all ranks, each row once; {} if there are none.

    Args:
        limit: size of the micro-batches; its rows per device form a batch.
        max_batches: limit of batches per device; 0: evaluate all rows.
    """
    engine.eval()
    steps = evaluation_steps(rows["length"][:], batch_size=limit.rows, max_batches=max_batches)
    lengths = forward_tokens(rows, padded=limit.padded)
    shares = [part for step in steps for part in share(lengths, step, limit)]
    totals: Metrics = {}
    for batch in objective.prepare(engine, (collated(objective, rows, part, engine.device) for part in shares)):
        watchdog.phase("evaluation")
        loss, metrics = objective.loss_of(engine, batch, 1.0)
        for name, value in {"loss": loss, "count": objective.count(batch), **metrics}.items():
            totals[name] = totals.get(name, 0.0) + value.to(torch.float64)
    return objective.evaluation(sum_metrics(totals)) if totals else {}


def evaluation_means(sums: Mapping[str, float], *, counted: str) -> dict[str, float]:
    """Divide the sums of an evaluation by their count, which is returned as `counted`; for Objective.evaluation."""
    means = {name: value / sums["count"] for name, value in sums.items() if name != "count"}
    return {"eval_loss": means.pop("loss"), **means, counted: sums["count"]}


def evaluation_steps(lengths: Sequence[int], *, batch_size: int, max_batches: int) -> list[list[int]]:
    """The rows of each batch of all ranks together.

    Args:
        batch_size: rows per device.
        max_batches: as for `evaluation`.
    """
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    size = batch_size * groups.data_parallel_size()
    steps = [longest_first[start : start + size] for start in range(0, len(lengths), size)]
    if max_batches and max_batches < len(steps):
        spread = len(steps) / max_batches  # sample all lengths, not only the longest
        steps = [steps[int(number * spread)] for number in range(max_batches)]
    return steps


def collated(objective: Objective, rows: Dataset, indices: list[int], device: torch.device) -> Batch:
    return to_device(objective.collate([rows[index] for index in indices]), device)


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def row_limit(
    engine: deepspeed.DeepSpeedEngine, rows: Dataset, *, rows_per_device: int, max_tokens: int
) -> MicroBatchLimit:
    """The limit of micro-batches of these rows."""
    limit = limit_of(engine.module, rows=rows_per_device, max_tokens=max_tokens)
    if limit.padded and "conversation_lengths" in rows.column_names:
        return replace(limit, max_tokens=1)  # each row becomes a rectangle of its conversations, and runs alone
    return limit


def share(lengths: Sequence[int], step: Sequence[int], limit: MicroBatchLimit) -> list[list[int]]:
    """This rank's micro-batches of a step; every rank has the same number, some may be empty.

    Args:
        lengths: forward_tokens of all rows.
        step: row indices of the step, of all ranks together.
    """
    rank, size = groups.data_parallel_rank(), groups.data_parallel_size()
    parts = limit.rank_share([int(lengths[row]) for row in step], rank=rank, world_size=size)
    return [[step[i] for i in part] for part in parts]


def forward_tokens(rows: Dataset, *, padded: bool = False) -> np.ndarray:
    """[rows] tokens of each row in its longest forward pass.

    Args:
        padded: both responses of a pair are padded to the longer one.
    """
    if padded and "rejected_ids" in rows.column_names:
        pairs = rows.select_columns(["chosen_ids", "rejected_ids"]).with_format("arrow")
        longest = [
            np.maximum(*(pyarrow.compute.list_value_length(column).to_numpy() for column in batch.columns))
            for batch in pairs.iter(1000)
        ]
        return 2 * np.concatenate(longest).astype(np.int64) if longest else np.zeros(0, dtype=np.int64)
    column = FORWARD_TOKENS if FORWARD_TOKENS in rows.column_names else "length"
    return np.asarray(rows[column][:], dtype=np.int64)
